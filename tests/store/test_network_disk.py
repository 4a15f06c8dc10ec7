"""What network file systems do that a disk does not: by two clients of one, mounted here (tests/network_disk.py)."""

from __future__ import annotations

import errno
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import settings
from hypothesis.stateful import initialize

from tests.disk.sources import bounced
from tests.examples import EXHAUSTIVE, THOROUGH
from tests.network_disk import REAL, Answer, Client, clients, real_clients
from tests.store.backend import Fault, Written
from tests.store.disk_backend import DiskBackend
from tests.store.filled import DATA, commit, contents, manifest_of, names, remove_begun, save
from tests.store.life import Life, live
from tests.store.recording import Disk
from torchtitan_lite.disk.block_reader import BlockReader
from torchtitan_lite.disk.block_writer import FUSE_REQUEST_BYTES, Bounced, write_blocks
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.durable import DISK
from torchtitan_lite.disk.mounts import is_fuse
from torchtitan_lite.disk.read_requests import Piece
from torchtitan_lite.errors import CheckpointUnreadable, FolderUnusable, LeaseLost
from torchtitan_lite.store import layout
from torchtitan_lite.store import probe as module
from torchtitan_lite.store.housekeeping import Housekeeping
from torchtitan_lite.store.probe import log_lacks, probe
from torchtitan_lite.store.retention import KeepLatest
from torchtitan_lite.store.store import CheckpointStore
from torchtitan_lite.stores import usable

OF_RANK_1 = layout.data_file(1, 0)
NUM_LIVES = {EXHAUSTIVE: 200, THOROUGH: 12}
_CODES = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOSPC, errno.ENOENT, errno.EEXIST)
_KINDS = (("change", False), ("change", True), ("any", False))
"""What a fault concerns, and whether it is done: an operation that was sent twice reports an error."""
_numbers = itertools.count()


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Client]]:
    with clients(tmp_path_factory.mktemp("network")) as found:
        yield found


@pytest.fixture
def name(mounted: list[Client]) -> Iterator[str]:
    """A folder of its own for each test, on both clients, which behave at first and at last."""
    for client in mounted:
        client.reset()
    yield f"run{next(_numbers)}"
    for client in mounted:
        client.reset()


def write_of_rank_1(store: CheckpointStore, place: str, data: bytes) -> FileRecord:
    """Write the file of rank 1 through the client of `store`, as the coordinator's plan says."""
    return store.new_file(place, OF_RANK_1).write(bounced(data))


def save_through_both(first: CheckpointStore, second: CheckpointStore, step: int, data: bytes) -> None:
    place = first.begin(step)
    first.new_file(place, DATA).write(bounced(data))
    first.add_metadata(place, b"of dcp")
    record = write_of_rank_1(second, place, data * 2)
    files = {DATA: FileRecord.of(data), OF_RANK_1: record}
    first.commit(step, manifest_of(step, world_size=2, files=files), place=place)


def test_a_step_saved_again_by_two_clients_is_never_written_into(mounted: list[Client], name: str) -> None:
    """The second client takes the name of the first save's folder for what is a committed checkpoint by now."""
    one, two = mounted
    two.set(Answer("mkdir", errno.EIO), remembers=True)  # And it makes no folder.
    first, second = CheckpointStore(one.folder / name), CheckpointStore(two.folder / name)
    for step, data in ((3, b"first"), (4, b"first"), (3, b"again"), (4, b"again"), (3, b"once more")):
        committed = contents(one.source / name)
        place = first.begin(step)
        record = write_of_rank_1(second, place, data * 100)
        now = contents(one.source / name)
        assert {path: now.get(path) for path in committed} == committed
        first.add_metadata(place, b"of dcp")
        manifest = manifest_of(step, world_size=1, files={OF_RANK_1: record})
        assert first.commit(step, manifest, place=place).step == step
        assert (one.source / name / f"step-{step}" / OF_RANK_1).read_bytes() == data * 100


def test_the_second_try_of_a_save_that_failed_is_written_by_both(mounted: list[Client], name: str) -> None:
    one, two = mounted
    two.set(remembers=True)
    first, second = CheckpointStore(one.folder / name), CheckpointStore(two.folder / name)
    for _ in range(3):
        write_of_rank_1(second, first.begin(7), b"that fails later")
        remove_begun(first, 7)
    save_through_both(first, second, 7, b"at last")
    assert (one.source / name / "step-7" / DATA).read_bytes() == b"at last"


def test_a_client_that_has_seen_no_folder_at_all_finds_that_of_a_save(mounted: list[Client], name: str) -> None:
    one, two = mounted
    two.set(remembers=True)
    root = two.folder / name / "outputs" / "checkpoint"
    assert not root.exists() and not root.parent.exists() and not root.parent.parent.exists()
    first = CheckpointStore(one.folder / name / "outputs" / "checkpoint")
    save_through_both(first, CheckpointStore(root), 1, b"data")
    assert CheckpointStore(root).latest() is not None


def test_a_rank_waits_for_the_folder_of_a_save_and_makes_none(mounted: list[Client], name: str) -> None:
    """Made by all ranks at one moment, it was lost in 2 of 400 saves on GlusterFS."""
    _, two = mounted
    (two.folder / name).mkdir()
    with pytest.raises(FileNotFoundError):
        write_of_rank_1(CheckpointStore(two.folder / name, look_seconds=0.0), layout.staging_dir(3, "0f3a"), b"data")
    assert names(two.source / name) == []


def test_a_file_system_that_refuses_direct_writes_is_written_through_the_page_cache(
    mounted: list[Client], name: str
) -> None:
    """It takes O_DIRECT at the open, and clearing it later does not reach the daemon."""
    one, _ = mounted
    one.set(Answer("write", errno.EINVAL, only_direct=True))
    (one.folder / name).mkdir()
    data = random.Random(1).randbytes((5 << 20) + 7)
    assert write_blocks(one.folder / name / "file", bounced(data)) == FileRecord.of(data)
    assert (one.source / name / "file").read_bytes() == data


def test_requests_are_large_on_fuse_alone(mounted: list[Client], name: str, tmp_path: Path) -> None:
    sizes: list[int] = []

    class Noting(Bounced):
        def reader(self, request_bytes: int) -> Callable[[int, int], memoryview]:
            sizes.append(request_bytes)
            return super().reader(request_bytes)

    one, _ = mounted
    is_fuse.cache_clear()  # The number of a mount before may come again.
    (one.folder / name).mkdir()
    for folder, expected in ((one.folder / name, FUSE_REQUEST_BYTES), (tmp_path, Bounced.request_bytes)):
        sizes.clear()
        write_blocks(folder / "file", Noting(20 << 20, lambda buffer, begin, end: None))
        assert {*sizes} == {expected}


def test_a_leftover_that_stays_is_a_warning_and_the_next_start_removes_it(
    mounted: list[Client], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, _ = mounted
    store = CheckpointStore(one.folder / name)
    save(store, 1)
    store.begin(2)
    with (one.folder / name / "step-1" / DATA).open("rb"):
        store.discard(store.get(1))
        one.set(Answer("rmdir", errno.ENOTEMPTY))
        with caplog.at_level(logging.WARNING, "torchtitan_lite"):
            CheckpointStore(one.folder / name).recover()
    assert "Directory not empty" in caplog.text and "Earlier" not in caplog.text
    one.reset()
    CheckpointStore(one.folder / name).recover()
    assert names(one.source / name) == []


def test_a_disk_without_figures_has_room(mounted: list[Client], name: str) -> None:
    one, _ = mounted
    one.set(has_no_figures=True)
    (one.folder / name).mkdir()
    assert CheckpointStore(one.folder / name).free_bytes() > 1 << 60


@pytest.mark.parametrize(
    ("answers", "knobs", "lack"),
    [
        ((), {"never_cuts": True}, "cut a file to a size"),
        ((Answer("fsyncdir", errno.EINVAL),), {}, "sync the names in a folder"),
        ((Answer("rename", errno.EXDEV),), {}, "rename a file over another"),
    ],
)
def test_what_could_not_keep_a_promise_is_refused_for_its_file_system(
    mounted: list[Client], name: str, answers: tuple[Answer, ...], knobs: dict[str, bool], lack: str
) -> None:
    one, _ = mounted
    (one.folder / name).mkdir()
    one.set(*answers, **knobs)
    with pytest.raises(FolderUnusable, match=rf"{name} \(fuse.* does not {lack} \(.*not a permission"):
        probe(one.folder / name)
    one.reset()
    assert names(one.source / name) == []


def test_a_slow_file_system_is_said_to_be_slow_and_not_waited_for(
    mounted: list[Client], name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = mounted
    monkeypatch.setattr(module, "_TRIED", {})  # The system gives the number of a device again.
    (one.folder / name).mkdir()
    one.set(delay_seconds=0.05)
    with caplog.at_level(logging.WARNING, "torchtitan_lite"):
        log_lacks(one.folder / name, limit_seconds=0.01)
    assert f"{name} is slow" in caplog.text


def test_steps_that_can_neither_be_renamed_nor_removed_stay_and_each_purge_says_so(
    mounted: list[Client], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What a lower layer of overlayfs has."""
    one, _ = mounted
    store = CheckpointStore(one.folder / name)
    for step in (1, 2, 3):
        save(store, step)
    one.set(Answer("rename", errno.EXDEV, name="step-1"), Answer("unlink", errno.EXDEV, name="step-1"))
    with caplog.at_level(logging.WARNING, "torchtitan_lite"):
        Housekeeping(KeepLatest(1), lambda event: None).purge(store)
    assert "step-1" in caplog.text and "Invalid cross-device link" in caplog.text
    assert {"step-1", "step-3"} <= {*names(one.source / name)}
    save(store, 4)


def test_an_error_at_close_names_the_file(mounted: list[Client], name: str) -> None:
    one, _ = mounted
    (one.folder / name).mkdir()
    one.set(Answer("flush", errno.EIO))
    with pytest.raises(OSError, match=f"Input/output error: '.*{name}/file'"):
        write_blocks(one.folder / name / "file", bounced(b"bytes"))


def test_a_folder_whose_file_system_has_no_links_is_taken_and_one_with_errors_is_named(
    mounted: list[Client], name: str
) -> None:
    one, _ = mounted
    root = one.folder / name
    one.set(Answer("link", errno.EPERM))
    lease = CheckpointStore(root).lease("run0", 5.0)
    lease.take()
    lease.release()
    one.set(Answer("link", errno.EIO), Answer("create", errno.EIO))
    with pytest.raises(FolderUnusable, match=f"{name}.*Input/output error"), usable(root):
        CheckpointStore(root).lease("run0", 5.0).take()


def test_a_listing_that_the_server_does_not_give_is_no_empty_folder(mounted: list[Client], name: str) -> None:
    one, _ = mounted
    save(CheckpointStore(one.folder / name), 1)
    one.set(Answer("open", errno.ESTALE, name=layout.MANIFEST))
    store = CheckpointStore(one.folder / name)
    assert store.committed() == []
    assert isinstance(store.errors_by_step()[1], CheckpointUnreadable)


def test_a_read_continues_through_a_new_descriptor_after_the_server_was_away(mounted: list[Client], name: str) -> None:
    one, _ = mounted
    (one.folder / name).mkdir()
    data = random.Random(2).randbytes((9 << 20) + 3)
    record = write_blocks(one.folder / name / "file", bounced(data))
    restarts = itertools.count(1)
    one.set(Answer("read", errno.EIO))
    found = bytearray(len(data))
    reader = BlockReader(pause=lambda seconds: one.set(restarts=next(restarts)))
    reader.read(one.folder / name / "file", record, [Piece(0, memoryview(found))])
    assert found == data
    assert next(restarts) > 1, "nothing was read twice"


@pytest.mark.parametrize(
    "answers",
    [
        (Answer("rename", errno.ENOENT, is_done=True),),
        (Answer("link", errno.EEXIST, is_done=True),),
        (Answer("unlink", errno.ENOENT, is_done=True), Answer("rmdir", errno.ENOENT, is_done=True)),
        (Answer("mkdir", errno.EEXIST, is_done=True),),
        (Answer("fallocate", errno.EPERM),),
    ],
    ids=lambda answers: answers[0].operation,
)
def test_requests_that_were_carried_out_twice_are_done(
    mounted: list[Client], name: str, answers: tuple[Answer, ...]
) -> None:
    one, two = mounted
    root = one.folder / name
    one.set(*answers)
    store = CheckpointStore(root)
    lease = store.lease("run0", 5.0)
    lease.take()
    store.folder_id(make=True)
    for step, data in ((1, b"first"), (2, b"first"), (2, b"again"), (3, b"first")):
        place = store.begin(step)
        store.new_file(place, DATA).write(bounced(data))
        store.add_metadata(place, b"of dcp")
        store.commit(step, manifest_of(step, files={DATA: FileRecord.of(data)}), place=place)
    store.empty(store.discard(store.get(1)))
    store.quarantine(3, ["a finding"])
    store.recover()
    lease.release()
    for client in (one, two):  # A client closes a file after the call returns, and lists later.
        there = [name for name in names(client.folder / name) if not name.startswith(layout.FOLDER_ID)]
        assert there == ["step-2", "step-3.corrupt"]
    assert (two.folder / name / "step-2" / DATA).read_bytes() == b"again"


def test_what_is_removed_while_another_reads_it_is_read_to_its_end(mounted: list[Client], name: str) -> None:
    one, _ = mounted
    store = CheckpointStore(one.folder / name)
    commit(store, 1, b"x" * 100_000)
    commit(store, 2)
    with (one.folder / name / "step-1" / DATA).open("rb", buffering=0) as file:
        trash = store.discard(store.get(1))
        with pytest.raises(OSError, match="Directory not empty"):
            store.empty(trash)  # The file that is open has another name there until it is closed.
        assert file.read() == b"x" * 100_000
    CheckpointStore(one.folder / name).recover()
    assert names(one.source / name) == ["step-2"]


class NetworkBackend(DiskBackend):
    """The folder `checkpoint` in a new folder of the file system of `mounted`, two clients that remember names."""

    def __init__(self, mounted: list[Client]) -> None:
        self._clients = mounted
        for client in mounted:
            client.reset()
            client.set(remembers=True)
        self._name = f"life{next(_numbers)}"
        super().__init__(mounted[0].source / self._name, durable=DISK)

    def attach(self, disk: Disk | None) -> None:
        self.store = self._store_of(0)

    def _store_of(self, client: int) -> CheckpointStore:
        return CheckpointStore(self._clients[client].folder / self._name / self.root.name, look_seconds=2.0)

    def next_process(self) -> None:
        self._clients.reverse()
        self.attach(None)

    def start(self) -> None:
        self.store.durable.make_dir(self.store.root)  # As the lease does, which a start takes first.
        super().start()

    def arm(self, fault: Fault | None) -> None:
        for client in self._clients:
            client.set()
        if fault is not None:
            operation, is_done = _KINDS[fault.kind % len(_KINDS)]
            code = _CODES[fault.seed % len(_CODES)]
            self._clients[0].set(Answer(operation, code, is_done=is_done, after=fault.at, times=1))

    def check_error(self, error: Exception) -> None:
        assert not isinstance(error, OSError) or error.filename, f"{error!r} names no file"

    def settle(self, fault: Fault) -> None:
        """Lose nothing: what ends is a process."""

    def refuse_changes(self) -> None:
        self._clients[0].set(Answer("change", errno.EROFS))

    def commit_late(self, written: Written) -> None:
        self._store_of(1).recover()

        def fence() -> NoReturn:
            self.refuse_changes()
            raise LeaseLost(str(self.root), "another")

        try:
            self.commit(written, fence)
        finally:
            self.arm(None)

    def put(self, place: str, name: str, data: bytes) -> FileRecord:
        client = (layout.rank_of(name) or 0) % 2
        store = self.store if client == 0 else self._store_of(1)
        return store.new_file(place, name).write(bounced(data))


@pytest.mark.slow
@pytest.mark.promise(
    "Two clients of a network file system that remember names, repeat and refuse requests lose no saved checkpoint.",
    section="crash",
)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.exhaustive) for part in range(1, 10))])
def test_every_acknowledged_save_loads_whatever_two_clients_of_a_network_file_system_do(
    part: int, mounted: list[Client], caplog: pytest.LogCaptureFixture
) -> None:
    class LifeOnNetwork(Life):
        @initialize()
        def first(self) -> None:
            self.begin(NetworkBackend(mounted))

    try:
        live(LifeOnNetwork, NUM_LIVES.get(settings.get_current_profile_name(), 4), caplog)
    finally:
        for client in mounted:
            client.reset()


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [*REAL])
def test_two_clients_of_a_real_file_system_lose_nothing_either(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with real_clients(tmp_path, kind) as mounted:

        class LifeOnReal(Life):
            @initialize()
            def first(self) -> None:
                self.begin(NetworkBackend(mounted))

        live(LifeOnReal, 20, caplog)
        test_a_step_saved_again_by_two_clients_is_never_written_into(mounted, "again")
        test_the_second_try_of_a_save_that_failed_is_written_by_both(mounted, "second")
        test_a_rank_waits_for_the_folder_of_a_save_and_makes_none(mounted, "waits")
        test_a_file_system_that_refuses_direct_writes_is_written_through_the_page_cache(mounted, "direct")
