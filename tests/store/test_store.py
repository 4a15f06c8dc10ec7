import ctypes
import dataclasses
import errno
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.disks import FailingDisk
from tests.store.filled import commit, later_format, manifest_of, names, staged, without_token
from tests.store.recording import swap
from torchtitan_lite.disk import durable
from torchtitan_lite.disk.block_writer import in_memory
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.errors import CheckpointDamaged, CheckpointNotFound, FormatTooNew, SaveFailed
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind, Manifest
from torchtitan_lite.store.store import CheckpointStore, free_disk_bytes


class Transcript(Durable):
    """Does each operation and records it; syncs are only recorded."""

    def __init__(self, exchanges: bool = True) -> None:
        self.exchanges = exchanges
        self.lines: list[str] = []

    def rename(self, src: Path, dst: Path) -> None:
        self._note(f"rename {src.name} {dst.name}")
        super().rename(src, dst)

    def exchange(self, a: Path, b: Path) -> bool:
        # Three renames replace the call, so that these tests do not depend on the file system.
        if self.exchanges:
            self._note(f"exchange {a.name} {b.name}")
            swap(a, b)
        return self.exchanges

    def fsync_file(self, fd: int) -> None:
        self._note("fsync file")

    def fsync_dir(self, path: Path) -> None:
        self._note(f"fsync {path.name}/")

    def write_file(self, path: Path, data: bytes) -> None:
        self._note(f"write {path.parent.name}/{path.name}")
        path.write_bytes(data)

    def remove_file(self, path: Path) -> None:
        self._note(f"remove {path.parent.name}/{path.name}")
        super().remove_file(path)

    def remove_tree(self, path: Path) -> None:
        self._note(f"remove {path.name}/")
        super().remove_tree(path)

    def _note(self, line: str) -> None:
        self.lines.append(without_token(line))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


@pytest.fixture
def store(root: Path) -> CheckpointStore:
    return CheckpointStore(root)


def manifest(step: int, kind: CheckpointKind = CheckpointKind.FULL, size: int = 4) -> Manifest:
    return manifest_of(step, kind=kind, files={"__0_0.distcp": FileRecord(size)})


def data_of(info: CheckpointInfo) -> bytes:
    return (info.path / "__0_0.distcp").read_bytes()


def steps(store: CheckpointStore) -> list[int]:
    return [info.step for info in store.committed()]


def test_making_a_store_touches_nothing(store: CheckpointStore, root: Path) -> None:
    assert not root.exists()
    assert (store.committed(), store.unmanaged(), store.latest(), store.recover()) == ([], [], None, [])
    assert not root.exists()


def test_a_committed_checkpoint_is_complete_and_listed(store: CheckpointStore, root: Path) -> None:
    info = commit(store, 5)
    assert info == CheckpointInfo(5, root / "step-5", CheckpointKind.FULL, 1.0, nbytes=len(b"data") + len(b"of dcp"))
    assert store.committed() == [info]
    assert store.get(5) == store.latest() == info
    assert names(info.path) == [".metadata", "__0_0.distcp", "manifest.json"]
    written = Manifest.parse((info.path / "manifest.json").read_bytes())
    assert written.files == {".metadata": FileRecord.of(b"of dcp"), "__0_0.distcp": FileRecord(4)}
    assert names(root) == ["step-5"]


def test_steps_are_listed_by_number(store: CheckpointStore) -> None:
    for step in (10, 9, 100):
        commit(store, step)
    assert steps(store) == [9, 10, 100]
    assert store.latest() == store.get(100)


def test_the_latest_full_checkpoint_is_not_a_weights_only_one(store: CheckpointStore) -> None:
    full, weights = commit(store, 1), commit(store, 2, kind=CheckpointKind.WEIGHTS_ONLY)
    assert store.latest() == full
    assert store.latest(CheckpointKind.WEIGHTS_ONLY) == weights


def test_a_missing_step_is_an_error_that_names_the_others(store: CheckpointStore, root: Path) -> None:
    commit(store, 200)
    commit(store, 400)
    with pytest.raises(CheckpointNotFound, match=r"step 7 .* 200, 400") as caught:
        store.get(7)
    assert (caught.value.folder, caught.value.available) == (str(root), (200, 400))


@pytest.mark.promise(
    "Each attempt of a save writes to a folder with a name that was never used, and never opens an existing file.",
    section="failure",
)
def test_each_save_has_a_folder_of_its_own_that_no_save_had_before(store: CheckpointStore, root: Path) -> None:
    places = [store.begin(5), CheckpointStore(root).begin(5), store.begin(5), store.begin(6)]
    assert len({*places}) == 4
    assert all(re.fullmatch("step-[56][.]staging-[0-9a-z]+", place) for place in places)
    assert sorted(path.name for path in root.iterdir()) == sorted(places)
    assert store.committed() == []


def test_only_the_coordinator_makes_the_folder_of_a_save(store: CheckpointStore, root: Path) -> None:
    place = store.begin(5)
    (root / place).rename(root / "elsewhere")
    for of_rank in (store, CheckpointStore(root, look_seconds=0.0)):
        with pytest.raises(FileNotFoundError, match=f"{place}/__1_0.distcp"):
            of_rank.new_file(place, "__1_0.distcp").write(in_memory(b"data"))
    assert names(root) == ["elsewhere"]


def test_a_rank_that_does_not_see_the_folder_of_a_save_yet_waits_for_it(store: CheckpointStore, root: Path) -> None:
    place = store.begin(5)
    (root / place).rename(root / "elsewhere")
    new = CheckpointStore(root).new_file(place, "__1_0.distcp")
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(new.write, in_memory(b"data"))
        (root / "elsewhere").rename(root / place)
        assert written.result(timeout=60) == FileRecord.of(b"data")
    assert (root / place / "__1_0.distcp").read_bytes() == b"data"


@pytest.mark.promise(
    "Each attempt of a save writes to a folder with a name that was never used, and never opens an existing file.",
    section="failure",
)
def test_a_file_that_is_there_is_never_written_into(store: CheckpointStore, root: Path) -> None:
    info = commit(store, 5)
    # As a client of a network file system may see it, to which the name is still what it was.
    (root / (place := "step-5.staging-1")).symlink_to(info.path)
    with pytest.raises(FileExistsError, match=r"__0_0\.distcp"):
        store.new_file(place, "__0_0.distcp").write(in_memory(b"of another save"))
    assert data_of(info) == b"data"


def test_removing_the_folder_of_a_save_does_not_follow_a_link(store: CheckpointStore, root: Path) -> None:
    info = commit(store, 5)
    (root / "step-6.staging-1").symlink_to(info.path)
    store.remove_staging(6, "step-6.staging-1")
    assert names(root) == ["step-5"]
    assert store.committed() == [info]


def test_an_abandoned_save_leaves_nothing(store: CheckpointStore, root: Path) -> None:
    commit(store, 5)
    place = staged(store, 6).name
    for name in (place, place, "", "step-5"):
        store.remove_staging(6, name)
    assert names(root) == ["step-5"]


def test_files_that_no_rank_wrote_for_this_save_are_not_committed(store: CheckpointStore) -> None:
    staging = staged(store, 5)
    (staging / "__7_0.distcp").write_bytes(b"of no rank")
    (staging / "manifest.json").mkdir()
    info = store.commit(5, manifest(5), place=staging.name)
    assert names(info.path) == [".metadata", "__0_0.distcp", "manifest.json"]


@pytest.mark.parametrize("missing", [".metadata", "__0_0.distcp"])
def test_a_save_without_one_of_its_files_is_refused(store: CheckpointStore, missing: str) -> None:
    staging = staged(store, 5)
    (staging / missing).unlink()
    with pytest.raises(SaveFailed, match=f"save of step 5 failed.*{missing} is missing"):
        store.commit(5, manifest(5), place=staging.name)
    assert store.committed() == []


def test_the_writer_s_record_of_the_metadata_is_used_if_there_is_one(store: CheckpointStore) -> None:
    place = staged(store, 5).name
    handed_over = FileRecord.of(b"OF DCP")
    given = manifest(5)
    info = store.commit(5, dataclasses.replace(given, files=given.files | {".metadata": handed_over}), place=place)
    written = Manifest.of_folder(info.path)
    assert written is not None and written.files[".metadata"] == handed_over


def test_a_save_without_a_staging_folder_is_refused(store: CheckpointStore) -> None:
    with pytest.raises(SaveFailed, match="missing"):
        store.commit(5, manifest(5), place="step-5.staging-1")


def test_a_file_of_another_size_than_was_written_is_refused(store: CheckpointStore) -> None:
    commit(store, 5, b"old")
    place = staged(store, 5, b"short").name
    with pytest.raises(SaveFailed, match=r"__0_0.distcp has 5 bytes, 6 were written"):
        store.commit(5, manifest(5, size=6), place=place)
    assert data_of(store.get(5)) == b"old"


def test_the_manifest_of_another_step_is_refused(store: CheckpointStore) -> None:
    place = staged(store, 5).name
    with pytest.raises(SaveFailed, match="its manifest is of step 6"):
        store.commit(5, manifest(6), place=place)


def of_run(run_id: str, step: int, *abandons: tuple[int, str]) -> Manifest:
    return dataclasses.replace(manifest(step), lineage=Lineage(run_id, abandons=abandons))


def test_a_save_of_an_abandoned_step_is_refused(store: CheckpointStore, root: Path) -> None:
    place = staged(store, 2).name
    store.commit(2, of_run("b2", 2, (3, "a1")), place=place)
    place = staged(store, 3).name
    with pytest.raises(SaveFailed, match="step-2 is of a rollback that abandons step 3 of run a1"):
        store.commit(3, of_run("a1", 3), place=place)
    assert names(root) == ["step-2", "step-3.staging"]
    store.commit(3, of_run("c3", 3), place=place)
    assert steps(store) == [2, 3]


class Lost(Exception):
    """The folder belongs to another job."""


@pytest.mark.promise("A job that has lost its folder renames and removes nothing there.", section="writer")
@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("there", ["nothing", "old", "foreign", "abandoning"])
def test_nothing_is_renamed_after_the_fence_raised(root: Path, there: str, exchanges: bool) -> None:
    for passes in itertools.count():
        disk = Transcript(exchanges)
        store = CheckpointStore(root / str(passes), durable=disk)
        if there == "old":
            commit(store, 5, b"old")
        elif there == "foreign":
            (store.root / "step-5").mkdir(parents=True)
        elif there == "abandoning":
            commit(store, 9).path.rename(store.root / "aside")
            place = staged(store, 5, b"old").name
            store.commit(
                5,
                dataclasses.replace(of_run("b2", 5, (9, "unknown")), files={"__0_0.distcp": FileRecord(3)}),
                place=place,
            )
            (store.root / "aside").rename(store.root / "step-9")
        place = staged(store, 5, b"new").name
        begun, calls = len(disk.lines), itertools.count()
        lines_then: list[int] = []

        def fence(
            passes: int = passes,
            calls: Iterator[int] = calls,
            disk: Transcript = disk,
            then: list[int] = lines_then,
        ) -> None:
            then.append(len(disk.lines))
            if next(calls) == passes:
                raise Lost

        store.check_lease = fence  # type: ignore[method-assign]
        try:
            store.commit(5, manifest(5, size=3), place=place)
        except Lost:
            assert len(disk.lines) == lines_then[-1]
            renamed = [line for line in disk.lines[begun:] if line.startswith(("rename", "exchange"))]
            # Between the two renames of a replacement, readers find the replaced checkpoint.
            assert renamed in (
                [],
                ["rename step-5 .replaced-step-5-1"],
                ["rename step-5 step-5.foreign"],
                *([["rename step-9 step-9.abandoned-unknown"]] if there == "abandoning" else []),
                ["rename step-9 step-9.abandoned-unknown", "rename step-5 .replaced-step-5-1"],
            )
            assert there in ("nothing", "foreign") or data_of(store.get(5)) == b"old"
        else:
            assert passes >= 2
            assert data_of(store.get(5)) == b"new"
            commits = ("rename step-5.staging step-5", "exchange step-5.staging step-5")
            done = next(at for at, line in enumerate(disk.lines) if at >= begun and line in commits)
            for at, line in enumerate(disk.lines[begun : done + 1], begun):
                if line.startswith(("rename step-5", "exchange")):
                    assert at in lines_then, f"something was done between the question and {line}"
            break


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_step_saved_again_is_only_the_new_checkpoint(root: Path, exchanges: bool) -> None:
    store = CheckpointStore(root, durable=Transcript(exchanges))
    commit(store, 5, b"old")
    new = commit(store, 5, b"newer", kind=CheckpointKind.WEIGHTS_ONLY)
    assert store.committed() == [new]
    assert data_of(new) == b"newer"
    assert names(root) == ["step-5"]


SEALED = ["fsync file", "write step-5.staging/manifest.json", "fsync step-5.staging/", "fsync checkpoint/"]


def test_a_commit_performs_these_operations_in_this_order(root: Path) -> None:
    disk = Transcript()
    commit(CheckpointStore(root, durable=disk), 5)
    made = disk.lines.index("fsync file")
    assert disk.lines[made:] == [*SEALED, "rename step-5.staging step-5", "fsync checkpoint/"]


def test_a_replacement_performs_these_operations_in_this_order(root: Path) -> None:
    disk = Transcript()
    commit(CheckpointStore(root), 5)
    commit(CheckpointStore(root, durable=disk), 5)
    made = disk.lines.index("fsync file")
    assert disk.lines[made:] == [
        *SEALED,
        "exchange step-5.staging step-5",
        "fsync checkpoint/",
        "rename step-5.staging .trash-step-5-1",
        "fsync checkpoint/",
        "remove .trash-step-5-1/",
    ]


def test_a_replacement_without_exchange_performs_these_operations_in_this_order(root: Path) -> None:
    disk = Transcript(exchanges=False)
    commit(CheckpointStore(root), 5)
    commit(CheckpointStore(root, durable=disk), 5)
    made = disk.lines.index("fsync file")
    assert disk.lines[made:] == [
        *SEALED,
        "rename step-5 .replaced-step-5-1",
        "fsync checkpoint/",
        "rename step-5.staging step-5",
        "fsync checkpoint/",
        "rename .replaced-step-5-1 .trash-step-5-1",
        "fsync checkpoint/",
        "remove .trash-step-5-1/",
    ]


def test_a_recovery_performs_these_operations_in_this_order(store: CheckpointStore, root: Path) -> None:
    for step in (1, 2):
        commit(store, step, b"old").path.rename(root / f".replaced-step-{step}-1")
    commit(store, 3).path.rename(root / ".trash-step-3-1")
    staged(store, 4)
    shutil.copytree(root / ".replaced-step-2-1", root / "step-2")
    disk = Transcript()
    CheckpointStore(root, durable=disk).recover()
    assert disk.lines == [
        "rename .replaced-step-1-1 step-1",
        f"fsync {root.parent.name}/",
        "fsync checkpoint/",
        "rename .replaced-step-2-1 .trash-step-2-1",
        "fsync checkpoint/",
        "remove .trash-step-2-1/",
        "remove .trash-step-3-1/",
        "remove step-4.staging/",
        "fsync checkpoint/",
    ]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO])
def test_a_recovery_needs_no_parent_folder_that_this_user_may_open(root: Path, code: int) -> None:
    class NotOurs(Transcript):
        def fsync_dir(self, path: Path) -> None:
            if path == root.parent:
                raise OSError(code, os.strerror(code), str(path))
            super().fsync_dir(path)

    commit(CheckpointStore(root), 3).path.rename(root / ".trash-step-3-1")
    store = CheckpointStore(root, durable=NotOurs())
    if code == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            store.recover()
    else:
        assert store.recover() == [root / ".trash-step-3-1"]


def test_a_replaced_checkpoint_that_cannot_be_removed_is_a_warning(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class NothingIsRemoved(Transcript):
        def remove_tree(self, path: Path) -> None:
            raise PermissionError(f"{path.name} is busy")

    store = CheckpointStore(root, durable=NothingIsRemoved())
    with caplog.at_level(logging.WARNING, "torchtitan_lite"):
        commit(store, 5, b"old")
        new = commit(store, 5, b"new")
    assert f"Could not remove the leftover {root}/.trash-step-5-1: .trash-step-5-1 is busy" in caplog.text
    assert store.committed() == [new]
    assert CheckpointStore(root).recover() == [root / ".trash-step-5-1"]
    assert data_of(store.get(5)) == b"new"


def test_a_leftover_that_cannot_be_removed_is_a_warning_and_the_start_continues(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Held(Transcript):
        """Keeps a file that a process has open, under another name, as the client of a network file system does."""

        def remove_tree(self, path: Path) -> None:
            if path.name == ".trash-step-1-1":
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
            super().remove_tree(path)

    store = CheckpointStore(root)
    for step in (1, 2):
        commit(store, step).path.rename(root / f".trash-step-{step}-1")
    kept, place = commit(store, 3), store.begin(4)
    assert CheckpointStore(root, durable=Held()).recover() == [root / ".trash-step-2-1", root / place]
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith(f"Could not remove the leftover {root}/.trash-step-1-1: [Errno 39] Directory not empty")
    assert (names(root), store.committed()) == ([".trash-step-1-1", "step-3"], [kept])
    assert store.recover() == [root / ".trash-step-1-1"]


def test_a_file_system_that_does_not_know_its_size_is_not_full(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 0))
    store = CheckpointStore(root)
    root.mkdir()
    assert store.free_bytes() >= 1 << 40


def test_a_failing_delete_raises_and_the_next_one_works(root: Path) -> None:
    class NothingIsRemoved(Transcript):
        def remove_tree(self, path: Path) -> None:
            raise PermissionError(f"{path.name} is busy")

    store = CheckpointStore(root)
    first, second = commit(store, 1), commit(store, 2)
    on_busy_disk = CheckpointStore(root, durable=NothingIsRemoved())
    with pytest.raises(PermissionError, match="busy"):
        on_busy_disk.empty(on_busy_disk.discard(first))
    assert store.committed() == [second]
    store.empty(store.discard(second))
    assert names(root) == [".trash-step-1-1"]


def test_nothing_is_left_of_a_removed_checkpoint_to_discard(store: CheckpointStore) -> None:
    info = commit(store, 1)
    store.empty(store.discard(info))
    assert store.discard(info) == []


DATA = "__0_0.distcp"


def test_sizes_as_committed_are_no_finding(store: CheckpointStore) -> None:
    info = commit(store, 5)
    (info.path / DATA).write_bytes(b"flip")
    assert store.check_sizes(info) == []


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lambda folder: (folder / DATA).unlink(), f"{DATA} is missing"),
        (lambda folder: (folder / DATA).write_bytes(b"dat"), f"{DATA} has 3 bytes, not 4"),
        (lambda folder: (folder / DATA).write_bytes(b"data+"), f"{DATA} has 5 bytes, not 4"),
        (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"{"), "manifest.json: it is not JSON"),
        (lambda folder: ((folder / DATA).unlink(), (folder / DATA).mkdir()), f"{DATA} is a folder"),
        (lambda folder: shutil.rmtree(folder), "manifest.json is missing"),
    ],
)
def test_a_missing_file_or_one_of_another_size_is_named(
    store: CheckpointStore, damage: Callable[[Path], object], finding: str
) -> None:
    info = commit(store, 5)
    damage(info.path)
    findings = store.check_sizes(info)
    assert len(findings) == 1 and findings[0].startswith(finding)


def test_quarantining_performs_these_operations_in_this_order(root: Path) -> None:
    disk = Transcript()
    commit(CheckpointStore(root), 5)
    assert CheckpointStore(root, durable=disk).quarantine(5, ["block 3 of a file"]) == root / "step-5.corrupt"
    assert disk.lines == [
        "rename step-5 step-5.corrupt",
        "fsync checkpoint/",
        "write step-5.corrupt/findings.json",
        "fsync step-5.corrupt/",
    ]


def test_a_quarantined_checkpoint_is_complete_has_its_findings_and_is_never_read_again(
    store: CheckpointStore, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = commit(store, 4)
    for data in (b"bad1", b"bad2"):
        commit(store, 5, data)
        with caplog.at_level(logging.WARNING, "torchtitan_lite"):
            store.quarantine(5, ["block 3 of __0_0.distcp", ".metadata is missing"])
    assert "Step 5 is damaged and is now" in caplog.text
    aside = [root / "step-5.corrupt", root / "step-5.corrupt-2"]
    assert [(path / DATA).read_bytes() for path in aside] == [b"bad1", b"bad2"]
    written = json.loads((aside[0] / "findings.json").read_text())
    assert written == {"step": 5, "findings": ["block 3 of __0_0.distcp", ".metadata is missing"]}
    assert store.latest() == old
    assert (store.committed(), store.unmanaged(), store.damaged(), store.recover()) == ([old], [], {}, [])
    new = commit(store, 5)
    store.empty(store.discard(new))
    assert names(root) == ["step-4", "step-5.corrupt", "step-5.corrupt-2"]


def test_a_checkpoint_whose_manifest_is_damaged_is_found_and_quarantined(store: CheckpointStore, root: Path) -> None:
    (commit(store, 5).path / "manifest.json").write_bytes(b"{")
    assert list(store.damaged()) == [5]
    store.quarantine(5, [store.damaged()[5].finding])
    assert (names(root), store.damaged()) == (["step-5.corrupt"], {})


def test_on_a_full_disk_a_checkpoint_is_quarantined_without_its_findings(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commit(CheckpointStore(root), 5)
    with caplog.at_level(logging.WARNING, "torchtitan_lite"):
        aside = CheckpointStore(root, durable=FailingDisk("write_file")).quarantine(5, ["a byte"])
    assert names(aside) == [".metadata", "__0_0.distcp", "manifest.json"]
    assert "findings.json: [Errno 28] No space left on device" in caplog.text


def test_checkpoints_that_a_damaged_one_abandons_stay_abandoned(store: CheckpointStore, root: Path) -> None:
    commit(store, 6).path.rename(root / "kept")
    place = staged(store, 5).name
    store.commit(5, of_run("b2", 5, (6, "unknown")), place=place)
    (root / "kept").rename(root / "step-6")
    store.quarantine(5, ["a byte"])
    assert names(root) == ["step-5.corrupt", "step-6.abandoned-unknown"]
    assert store.committed() == []


def test_the_free_room_of_a_missing_folder_is_that_of_its_parent(tmp_path: Path) -> None:
    assert free_disk_bytes(tmp_path / "outputs" / "checkpoint") > 0
    assert 0 < CheckpointStore(tmp_path / "outputs" / "checkpoint").free_bytes() < 1 << 70


def put_unknown_names(root: Path) -> None:
    for name in ("foo", "step-abc", "step-99.tmp", "step-50", "step-007", "step-10.bak", "my-step-3", "step-6.corrupt"):
        (root / name).mkdir(parents=True)
    for name in ("foo", "step-007", "step-10.bak"):
        (root / name / ".metadata").write_bytes(b"theirs")
        (root / name / "manifest.json").write_bytes(manifest(7).to_json())
    (root / "step-60").symlink_to("gone")
    (root / "step-70").write_bytes(b"a file")
    (root / "step-80").symlink_to("foo")
    (root / "step-90" / "manifest.json").mkdir(parents=True)


def test_unknown_names_are_never_chosen_and_never_touched(store: CheckpointStore, root: Path) -> None:
    put_unknown_names(root)
    foreign = names(root)
    info = commit(store, 5)
    assert (store.committed(), store.latest(), store.unmanaged()) == ([info], info, [])
    assert store.recover() == []
    store.empty(store.discard(info))
    assert names(root) == foreign
    assert (root / "foo" / ".metadata").read_bytes() == b"theirs"


def test_a_damaged_latest_checkpoint_is_skipped_with_a_warning(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    old, latest = commit(store, 5), commit(store, 6)
    (latest.path / "manifest.json").write_bytes(b"{")
    with caplog.at_level(logging.WARNING, "torchtitan_lite"):
        assert store.latest() == old
    assert "Skipped step 6" in caplog.text
    assert store.committed() == [old]
    with pytest.raises(CheckpointDamaged, match="step-6"):
        store.get(6)


def test_a_copy_under_another_steps_name_is_not_that_step(store: CheckpointStore, root: Path) -> None:
    info = commit(store, 5)
    shutil.copytree(info.path, root / "step-9")
    assert store.committed() == [info]
    with pytest.raises(CheckpointDamaged, match="it is the manifest of step 5"):
        store.get(9)


def test_a_checkpoint_of_a_newer_version_stops_the_search_and_is_not_skipped(
    store: CheckpointStore,
) -> None:
    commit(store, 5)
    path = commit(store, 6).path / "manifest.json"
    path.write_bytes(later_format(path.read_bytes()))
    for ask in (store.committed, store.latest, lambda: store.get(6)):
        with pytest.raises(FormatTooNew, match="step-6"):
            ask()


def test_torchtitan_s_own_checkpoints_are_listed_apart(store: CheckpointStore, root: Path) -> None:
    info = commit(store, 5)
    for step, name in ((7, ".metadata"), (8, "__0_0.distcp")):
        (root / f"step-{step}").mkdir()
        (root / f"step-{step}" / name).write_bytes(b"theirs")
    assert store.unmanaged() == [root / "step-7", root / "step-8"]
    assert (store.committed(), store.latest(), store.recover()) == ([info], info, [])
    with pytest.raises(CheckpointNotFound, match="it has 5"):
        store.get(7)


def test_what_is_not_ours_and_in_the_way_of_a_commit_is_renamed(
    store: CheckpointStore, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root.mkdir()
    (root / "step-1").symlink_to("gone")
    (root / "step-2").write_bytes(b"theirs")
    (root / "step-3").mkdir()
    (root / "step-3.foreign").mkdir()
    (root / "step-4").mkdir()
    (root / "step-4" / ".metadata").write_bytes(b"theirs")
    with caplog.at_level(logging.WARNING, "torchtitan_lite"):
        committed = [commit(store, step) for step in (1, 2, 3, 4)]
    assert store.committed() == committed
    assert len(caplog.records) == 4
    assert "step-4 has no intact manifest.json and is in the way of a save; it is now" in caplog.text
    assert (root / "step-1.foreign").readlink() == Path("gone")
    assert (root / "step-2.foreign").read_bytes() == b"theirs"
    assert (root / "step-3.foreign-2").is_dir()
    assert (root / "step-4.foreign" / ".metadata").read_bytes() == b"theirs"
    assert store.recover() == []


def test_a_damaged_checkpoint_is_kept_when_its_step_is_saved_again(store: CheckpointStore, root: Path) -> None:
    (commit(store, 5, b"old").path / "manifest.json").write_bytes(b"{")
    assert data_of(commit(store, 5, b"new")) == b"new"
    assert (root / "step-5.foreign" / "__0_0.distcp").read_bytes() == b"old"


def test_a_reader_sees_the_replaced_checkpoint_until_recovery_renames_it_back(
    store: CheckpointStore, root: Path
) -> None:
    commit(store, 5, b"old").path.rename(root / ".replaced-step-5-1")
    staged(store, 5, b"new")
    assert store.latest() == store.get(5)
    assert data_of(store.get(5)) == b"old"
    assert store.get(5).path == root / ".replaced-step-5-1"
    assert [without_token(path.name) for path in store.recover()] == ["step-5", "step-5.staging"]
    assert data_of(store.get(5)) == b"old"
    assert names(root) == ["step-5"]


def test_the_checkpoint_that_was_replaced_last_is_renamed_back(store: CheckpointStore, root: Path) -> None:
    for number in (2, 10):
        commit(store, 5, str(number).encode()).path.rename(root / f".replaced-step-5-{number}")
    assert data_of(store.get(5)) == b"10"
    store.recover()
    assert data_of(store.get(5)) == b"10"
    assert names(root) == ["step-5"]


def test_a_replaced_checkpoint_is_kept_while_something_else_has_its_name(store: CheckpointStore, root: Path) -> None:
    commit(store, 5).path.rename(root / ".replaced-step-5-1")
    (root / "step-5").mkdir()
    assert store.recover() == []
    assert names(root) == [".replaced-step-5-1", "step-5"]
    assert steps(store) == [5]


@pytest.mark.parametrize("field", [{"rolls_back_to": 2}, {"counts_again": True}])
def test_a_checkpoint_whose_file_was_touched_is_deleted_also_after_a_rollback(
    store: CheckpointStore, field: dict[str, Any]
) -> None:
    info = commit(store, 3, lineage=Lineage("b2", parent_step=2, ancestors=((2, "a1"),), **field))
    # As a backup of hard links does: the manifest is read again.
    (store.root / "step-3" / "manifest.json").chmod(0o600)
    store.empty(store.discard(info))
    assert store.committed() == []


def test_deleting_does_not_bring_back_an_older_checkpoint(store: CheckpointStore, root: Path) -> None:
    commit(store, 5, b"old").path.rename(root / "kept")
    new = commit(store, 5, b"new")
    (root / "kept").rename(root / ".replaced-step-5-1")
    store.empty(store.discard(new))
    assert store.committed() == []
    assert store.recover() == []
    assert names(root) == []


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_job_that_lost_the_folder_while_sealing_does_not_rename_what_the_replaced_checkpoint_abandons(
    root: Path, exchanges: bool
) -> None:
    disk = Transcript(exchanges)
    store = CheckpointStore(root, durable=disk)
    commit(store, 9).path.rename(root / "aside")
    place = staged(store, 5, b"old").name
    store.commit(5, dataclasses.replace(of_run("b2", 5, (9, "unknown")), files={DATA: FileRecord(3)}), place=place)
    (root / "aside").rename(root / "step-9")
    place = staged(store, 5, b"new").name
    begun = len(disk.lines)

    def fence() -> None:
        if "write step-5.staging/manifest.json" in disk.lines[begun:]:
            raise Lost

    store.check_lease = fence  # type: ignore[method-assign]
    with pytest.raises(Lost):
        store.commit(5, manifest(5, size=3), place=place)
    assert names(root) == ["step-5", "step-5.staging", "step-9"]


def step_5_replaced_twice(root: Path) -> CheckpointStore:
    """Save step 5 three times; the replaced checkpoints are still there, as after a crash."""
    store = CheckpointStore(root)
    for number, data in enumerate((b"first", b"second"), 1):
        commit(store, 5, data).path.rename(root / f"kept-{number}")
    commit(store, 5, b"third")
    for number in (1, 2):
        (root / f"kept-{number}").rename(root / f".replaced-step-5-{number}")
    return store


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_cut_quarantine_never_exposes_an_older_checkpoint_of_the_step(root: Path, at: int) -> None:
    class CutAtRename(Durable):
        renames = 0

        def rename(self, src: Path, dst: Path) -> None:
            self.renames += 1
            if self.renames == at:
                raise KeyboardInterrupt
            super().rename(src, dst)

    store = step_5_replaced_twice(root)
    with pytest.raises(KeyboardInterrupt):
        CheckpointStore(root, durable=CutAtRename()).quarantine(5, ["a byte"])
    assert data_of(store.get(5)) == b"third"


def test_a_quarantine_takes_every_checkpoint_of_the_step_and_puts_findings_in_the_damaged_one(root: Path) -> None:
    store = step_5_replaced_twice(root)
    aside = store.quarantine(5, ["a byte"])
    assert names(root) == ["step-5.corrupt", "step-5.corrupt-2", "step-5.corrupt-3"]
    assert [path for path in root.iterdir() if (path / "findings.json").exists()] == [aside]
    assert (aside / DATA).read_bytes() == b"third"


def test_a_folder_of_the_size_of_a_file_is_found_in_its_place(store: CheckpointStore, root: Path) -> None:
    (root / "folder").mkdir(parents=True)
    info = commit(store, 5, b"x" * (root / "folder").stat().st_size)
    (info.path / DATA).unlink()
    (root / "folder").rename(info.path / DATA)
    assert store.check_sizes(info) == [f"{DATA} is a folder"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EPERM])
def test_a_step_is_replaced_also_where_the_system_refuses_to_swap_names(
    store: CheckpointStore, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*arguments: object) -> int:
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(durable, "libc", lambda: SimpleNamespace(renameat2=refuse))
    commit(store, 5, b"old")
    assert data_of(commit(store, 5, b"new")) == b"new"
    assert names(root) == ["step-5"]


def test_two_stores_of_one_folder_are_in_the_same_place_however_it_is_spelt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outputs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "outputs")
    monkeypatch.chdir(tmp_path)
    one = CheckpointStore(tmp_path / "outputs" / "checkpoint")
    for spelling in ("outputs/checkpoint", "link/checkpoint", "outputs/../outputs/checkpoint"):
        assert one.identity == CheckpointStore(Path(spelling)).identity
    for spelling in ("outputs", "outputs/checkpoint/x", "checkpoint"):
        assert one.identity != CheckpointStore(Path(spelling)).identity


def test_findings_are_text_with_a_line_for_each(store: CheckpointStore, root: Path) -> None:
    commit(store, 5)
    aside = store.quarantine(5, ["block 3 of a file", ".metadata is missing"])
    expected = [
        "{",
        '  "step": 5,',
        '  "findings": [',
        '    "block 3 of a file",',
        '    ".metadata is missing"',
        "  ]",
        "}",
        "",
    ]
    assert (aside / "findings.json").read_text().split("\n") == expected
