"""What a run asks of its folder holds on a disk and in an object store alike."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.disk.sources import bounced
from tests.store.filled import manifest_of
from torchtitan_lite.bucket.bucket_store import BucketStore
from torchtitan_lite.bucket.objects import connect
from torchtitan_lite.checkpoint.reading.files import files_of
from torchtitan_lite.config.address import parse_address
from torchtitan_lite.disk.read_requests import Piece
from torchtitan_lite.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    LeaseLost,
    SaveFailed,
)
from torchtitan_lite.events import ignore
from torchtitan_lite.store import layout
from torchtitan_lite.store.housekeeping import Housekeeping
from torchtitan_lite.store.lease import Lease
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind, Manifest
from torchtitan_lite.store.place import ObjectPlace
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.store.retention import KeepLatest
from torchtitan_lite.store.store import CheckpointStore
from torchtitan_lite.stores import open_store

DATA = layout.data_file(0, 0)
ONCE = {"identity", "committed", "latest", "damaged", "unreadable", "listed", "unmanaged", "send"}
"""What the base class does, for both stores or for one of them."""


@pytest.mark.parametrize("kind", [CheckpointStore, BucketStore])
def test_each_store_does_all_by_itself_but_what_is_said_once(kind: type) -> None:
    """A method that one lacked would be that of the base, which does nothing."""
    promised = {name for name in vars(StoresCheckpoints) if not name.startswith("_")}
    assert promised - ONCE <= {*vars(kind)}


@dataclass
class Folder:
    """A folder of checkpoints, and what a fault can do to its files."""

    address: str
    leases: list[Lease] = field(default_factory=list)

    def open(self) -> StoresCheckpoints:
        """Return a store that knows nothing of the others."""
        return open_store(self.address)

    def taken(self) -> StoresCheckpoints:
        """Return a store whose folder this process holds."""
        store = self.open()
        lease = store.lease("a1", 30.0)
        lease.take()
        self.leases.append(lease)
        return store

    def write(self, info: CheckpointInfo, name: str, data: bytes) -> None:
        """Overwrite a file of a committed checkpoint, as no job does."""
        if isinstance(info.path, ObjectPlace):
            connect(parse_address(info.path.address)).put(f"{info.path.name}/{name}", data)
        else:
            (info.path / name).write_bytes(data)

    def remove(self, info: CheckpointInfo, name: str) -> None:
        if isinstance(info.path, ObjectPlace):
            connect(parse_address(info.path.address)).delete([f"{info.path.name}/{name}"])
        else:
            (info.path / name).unlink()

    def close(self) -> None:
        for lease in self.leases:
            lease.release()


@pytest.fixture(params=["disk", "S3", "Azure"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    fixtures = {"S3": "folder", "Azure": "azure_folder"}
    address = str(tmp_path / "run") if request.param == "disk" else request.getfixturevalue(fixtures[request.param])
    with closing(Folder(address)) as opened:
        yield opened


def written(
    store: StoresCheckpoints, step: int, data: bytes, *, run_id: str = "a1", **settings: object
) -> tuple[str, Manifest]:
    """Write the files of `step` as one rank does; return the place and the manifest of the save."""
    place = store.begin(step)
    record = store.new_file(place, DATA).write(bounced(data))
    store.add_metadata(place, b"of dcp")
    abandons = tuple(settings.pop("abandons", ()))  # type: ignore[call-overload]
    fields = {"files": {DATA: record}, "lineage": Lineage(run_id, abandons=abandons), **settings}
    return place, manifest_of(step, **fields)


def save(store: StoresCheckpoints, step: int, data: bytes = b"data", **settings: object) -> CheckpointInfo:
    place, manifest = written(store, step, data, **settings)
    return store.commit(step, manifest, place=place)


def read(info: CheckpointInfo) -> bytes:
    files = files_of(info.path)
    manifest = files.manifest()
    assert manifest is not None
    record = manifest.files[DATA]
    data = bytearray(record.size)
    files.reader().read(files.path_of(DATA), record, [Piece(0, memoryview(data))])
    return bytes(data)


def steps(store: StoresCheckpoints) -> list[int]:
    return [info.step for info in store.committed()]


def test_a_folder_that_does_not_exist_has_no_checkpoints(run: Folder) -> None:
    store = run.open()
    assert (store.committed(), store.intact(), store.unmanaged(), store.latest()) == ([], [], [], None)
    assert (store.damaged(), store.unreadable(), store.folder_id(make=False)) == ({}, {}, "")


@pytest.mark.promise("Disk and store pass the same suite of tests.", section="bucket")
def test_a_committed_checkpoint_is_read_back_by_another_process_of_any_rank(run: Folder) -> None:
    info = save(run.taken(), 5, b"five")
    store = run.open()
    assert store.committed() == [info] == store.intact()
    assert store.get(5) == store.latest() == info
    assert read(info) == b"five"
    assert store.check_sizes(info) == []
    assert str(info.path).startswith(f"{run.address}/step-5")


@pytest.mark.slow
def test_a_large_file_is_read_back(run: Folder) -> None:
    data = bytes(itertools.islice(itertools.cycle(range(251)), 20_000_001))
    assert read(save(run.taken(), 5, data)) == data


def test_an_empty_file_is_read_back(run: Folder) -> None:
    assert read(save(run.taken(), 5, b"")) == b""


def test_steps_are_listed_by_number(run: Folder) -> None:
    store = run.taken()
    for step in (10, 9, 100):
        save(store, step)
    assert steps(store) == steps(run.open()) == [9, 10, 100]


def test_a_save_that_is_not_committed_is_not_listed_and_its_removal_changes_nothing_else(run: Folder) -> None:
    store = run.taken()
    save(store, 5)
    place, _ = written(store, 6, b"half")
    assert steps(store) == steps(run.open()) == [5]
    store.remove_staging(6, place)
    store.remove_staging(6, place)
    assert steps(store) == [5]
    assert read(save(store, 6, b"again")) == b"again"


def test_a_second_save_of_a_step_replaces_the_first(run: Folder) -> None:
    store = run.taken()
    save(store, 5, b"old")
    save(store, 5, b"newer")
    assert read(run.open().get(5)) == b"newer"
    assert steps(store) == [5]


def test_a_failed_second_save_of_a_step_leaves_the_first(run: Folder) -> None:
    store = run.taken()
    save(store, 5, b"old")
    place, _ = written(store, 5, b"newer")
    store.remove_staging(5, place)
    assert read(run.open().get(5)) == b"old"


def test_weights_only_is_not_the_latest_full_one(run: Folder) -> None:
    store = run.taken()
    save(store, 5)
    save(store, 6, kind=CheckpointKind.WEIGHTS_ONLY)
    for each in (store, run.open()):
        assert (latest := each.latest()) is not None
        assert latest.step == 5
        assert (weights := each.latest(CheckpointKind.WEIGHTS_ONLY)) is not None
        assert weights.step == 6


def test_a_step_that_is_not_there_is_named_with_those_that_are(run: Folder) -> None:
    store = run.taken()
    save(store, 5)
    with pytest.raises(CheckpointNotFound) as caught:
        store.get(6)
    assert (caught.value.folder, caught.value.step, [*caught.value.available]) == (run.address, 6, [5])


def test_what_a_branch_abandons_is_not_listed(run: Folder) -> None:
    store = run.taken()
    for step in (5, 6, 7):
        save(store, step, run_id="old")
    save(store, 6, b"branch", run_id="new", abandons=[(6, "old"), (7, "old")])
    assert steps(store) == steps(run.open()) == [5, 6]
    assert read(store.get(6)) == b"branch"


def test_a_discarded_checkpoint_is_absent_and_its_files_go(run: Folder) -> None:
    store = run.taken()
    first, second = save(store, 5), save(store, 6)
    trash = store.discard(first)
    assert steps(store) == steps(run.open()) == [6]
    store.empty(trash)
    assert files_of(first.path).identity() is None
    assert files_of(second.path).identity() is not None
    assert not store.discard(first)


def test_a_quarantined_checkpoint_is_absent_and_keeps_its_files(run: Folder) -> None:
    store = run.taken()
    save(store, 5)
    damaged = save(store, 6, b"damaged")
    aside = store.quarantine(6, ["a block is wrong"])
    assert steps(store) == steps(run.open()) == [5]
    assert store.damaged() == {}
    assert files_of(aside).sizes_of([DATA]) == {DATA: len(b"damaged")}
    assert str(aside)
    assert damaged.step == 6


def test_pins_are_kept_without_a_lease_and_seen_by_all(run: Folder) -> None:
    store = run.taken()
    save(store, 5)
    with run.open().pins.changing() as pinned:
        pinned |= {5, 6}
    assert store.pins.read() == run.open().pins.read() == {5, 6}
    with store.pins.changing() as pinned:
        pinned.discard(6)
    assert run.open().pins.read() == {5}
    save(store, 7)
    assert store.pins.read() == {5}


def test_housekeeping_removes_what_is_not_kept_but_no_pinned_step(run: Folder) -> None:
    store = run.taken()
    for step in (1, 2, 3, 4):
        save(store, step)
    with run.open().pins.changing() as pinned:
        pinned.add(1)
    Housekeeping(KeepLatest(2), ignore).purge(store)
    assert steps(store) == steps(run.open()) == [1, 3, 4]


def test_one_job_has_the_folder_and_all_ranks_see_which(run: Folder) -> None:
    store = run.open()
    lease = store.lease("a1", 30.0)
    lease.take()
    lease.take()
    token = lease.token
    assert run.open().lease("a1", 30.0).is_visible(token)
    assert not run.open().lease("a1", 30.0).is_visible("another")
    lease.check()
    lease.release()
    lease.release()
    assert not run.open().lease("a1", 30.0).is_visible(token)


def test_a_job_that_lost_the_folder_commits_nothing(run: Folder) -> None:
    first = run.open()
    lost = first.lease("a1", 30.0)
    lost.take()
    save(first, 5, b"old")
    place, manifest = written(first, 6, b"late")
    second = run.taken()  # Of the same process, so at once.
    with pytest.raises(LeaseLost):
        lost.check()
    with pytest.raises(LeaseLost):
        first.commit(6, manifest, place=place)
    assert steps(second) == steps(run.open()) == [5]
    assert read(save(second, 6, b"of the second")) == b"of the second"
    lost.release()
    assert steps(run.open()) == [5, 6]


@pytest.mark.parametrize("fault", ["shorter", "missing"])
def test_a_file_that_is_not_what_was_written_is_no_commit(run: Folder, fault: str) -> None:
    store = run.taken()
    save(store, 5, b"old")
    place, manifest = written(store, 6, b"data")
    other = (
        {DATA: manifest.files[DATA].__class__(3)}
        if fault == "shorter"
        else {layout.data_file(1, 0): manifest.files[DATA]}
    )
    with pytest.raises(SaveFailed, match="has 4 bytes" if fault == "shorter" else "is missing"):
        store.commit(6, dataclasses.replace(manifest, files=other), place=place)
    store.remove_staging(6, place)
    assert steps(store) == steps(run.open()) == [5]


def test_a_file_of_another_size_is_found_without_reading_it(run: Folder) -> None:
    store = run.taken()
    info = save(store, 5, b"data")
    run.write(info, DATA, b"longer than data")
    (finding,) = run.open().check_sizes(info)
    assert finding == f"{DATA} has 16 bytes, not 4"
    run.remove(info, DATA)
    (finding,) = run.open().check_sizes(info)
    assert finding == f"{DATA} is missing"


def test_a_damaged_manifest_is_damage_of_its_step_alone(run: Folder) -> None:
    store = run.taken()
    save(store, 5)
    info = save(store, 6)
    run.write(info, layout.MANIFEST, b"{}")
    other = run.open()
    assert steps(other) == [5]
    assert [*other.damaged()] == [6]
    with pytest.raises(CheckpointDamaged):
        other.get(6)


def test_a_checkpoint_that_is_gone_has_no_identity_and_its_successor_another(run: Folder) -> None:
    store = run.taken()
    first = save(store, 5, b"old")
    before = files_of(first.path).identity()
    assert before is not None
    second = save(store, 5, b"newer")
    assert files_of(second.path).identity() not in (None, before)


def test_the_folder_has_one_id_that_stays(run: Folder) -> None:
    store = run.taken()
    made = store.folder_id(make=True)
    assert made
    assert run.open().folder_id(make=True) == made == run.open().folder_id(make=False)


def test_a_start_removes_what_a_killed_save_left_and_no_checkpoint(run: Folder) -> None:
    store = run.taken()
    save(store, 5)
    written(store, 6, b"half")
    after = run.taken()
    after.recover()
    assert steps(after) == [5]
    assert after.recover() == [] or isinstance(run.open().committed()[0].path, ObjectPlace)
    assert read(save(after, 6, b"again")) == b"again"
