"""Files that several checkpoints have: what their removal frees, and which of them stay."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.errors import SaveFailed
from torchtitan_lite.events import Event
from torchtitan_lite.store import layout
from torchtitan_lite.store.housekeeping import Housekeeping
from torchtitan_lite.store.manifest import FORMAT_WITH_STILL, CheckpointInfo, CheckpointKind, Manifest
from torchtitan_lite.store.retention import KeepAll, KeepLatest, judge
from torchtitan_lite.store.shared_files import Removal, bytes_together, others_with, shared_bytes, shared_files
from torchtitan_lite.store.store import CheckpointStore

CHANGES, STILL = layout.data_file(0, layout.CHANGES), layout.data_file(0, layout.STILL)
OWN_BYTES, STILL_BYTES = 100, 1000


class Folder:
    """A folder of checkpoints on a disk of `capacity` bytes, of which only files of ranks take some."""

    def __init__(self, root: Path, capacity: int = 1 << 30) -> None:
        self.capacity = capacity
        self.store = CheckpointStore(root, free_bytes=self.free_bytes)

    def free_bytes(self, folder: Path) -> int:
        files = {path.stat().st_ino: path.stat().st_size for path in folder.rglob("*.distcp")}
        return self.capacity - sum(files.values())

    def save(self, step: int, parent: int | None = None) -> CheckpointInfo:
        """Commit `step`, which shares its still file with `parent`."""
        staging = self.store.stage(step)
        files = {CHANGES: bytes(OWN_BYTES), STILL: bytes(STILL_BYTES)}
        (staging / CHANGES).write_bytes(files[CHANGES])
        if parent is None:
            (staging / STILL).write_bytes(files[STILL])
        else:
            (staging / STILL).hardlink_to(self.store.root / layout.step_dir(parent) / STILL)
        manifest = Manifest(
            step=step,
            kind=CheckpointKind.FULL,
            created_at=1.0,
            world_size=1,
            versions={},
            files={name: FileRecord.of(data) for name, data in files.items()},
            extra={"dcp_metadata": "left out"},
            format_version=FORMAT_WITH_STILL,
        )
        return self.store.commit(step, manifest)

    def steps(self) -> list[int]:
        return [info.step for info in self.store.committed()]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Return a folder in which 2 and 3 share a file with 1, and 5 with 4."""
    folder = Folder(tmp_path / "checkpoint")
    for step, parent in ((1, None), (2, 1), (3, 2), (4, None), (5, 4)):
        folder.save(step, parent)
    return folder


def test_a_removal_frees_a_shared_file_with_its_last_name(folder: Folder) -> None:
    removal = Removal(folder.store.shared_files)
    infos = {info.step: info for info in folder.store.committed()}
    both = OWN_BYTES + STILL_BYTES
    assert [removal.add(infos[step]) for step in (1, 3, 2, 4, 5)] == [OWN_BYTES, OWN_BYTES, both, OWN_BYTES, both]


def test_a_name_elsewhere_keeps_the_bytes(folder: Folder, tmp_path: Path) -> None:
    info = folder.store.get(1)
    shutil.copytree(info.path, tmp_path / "backup", copy_function=lambda a, b: Path(b).hardlink_to(a))
    for step in (2, 3):
        folder.store.empty(folder.store.discard(folder.store.get(step)))
    assert Removal(folder.store.shared_files).add(info) == OWN_BYTES
    assert shared_bytes(shared_files(info)) == STILL_BYTES


def test_bytes_that_two_checkpoints_have_together_are_counted_once(folder: Folder) -> None:
    assert bytes_together(map(shared_files, folder.store.committed())) == 3 * STILL_BYTES


def test_next_to_the_latest_the_latest_of_another_copy_stays(folder: Folder) -> None:
    def ignore(event: Event) -> None: ...

    Housekeeping(KeepLatest(1), ignore).purge(folder.store)
    assert folder.steps() == [3, 5]
    Housekeeping(KeepLatest(1), ignore).purge(folder.store)
    assert folder.steps() == [3, 5]


def test_where_nothing_is_shared_no_other_copy_stays(folder: Folder) -> None:
    """As in an object store: the manifests are the same there."""
    verdicts = judge(KeepLatest(1), folder.store.committed())
    assert [verdict.info.step for verdict in verdicts if not verdict.goes] == [5]


def test_a_removal_is_reported_with_what_it_freed(folder: Folder) -> None:
    events: list[Event] = []
    housekeeping = Housekeeping(KeepLatest(1), events.append)
    housekeeping.purge(folder.store)
    assert [(event.step, event.figures["bytes"]) for event in events] == [(step, OWN_BYTES) for step in (1, 2, 4)]


def test_where_space_lacks_only_what_is_really_freed_counts(folder: Folder) -> None:
    """1 and 2 free little, because 3 has the file, and 3 is the other copy: the disk stays as full as it is."""
    folder.capacity = 2 * STILL_BYTES + 5 * OWN_BYTES
    housekeeping = Housekeeping(KeepAll(), lambda event: None, min_free_bytes=2 * OWN_BYTES)
    housekeeping.purge(folder.store)
    assert folder.steps() == [3, 4, 5]
    assert folder.free_bytes(folder.store.root) == 2 * OWN_BYTES


def test_a_save_needs_room_for_what_it_is_to_write(folder: Folder) -> None:
    housekeeping = Housekeeping(KeepAll(), lambda event: None)
    folder.capacity = 2 * STILL_BYTES + 6 * OWN_BYTES
    with pytest.raises(SaveFailed, match="has room for"):
        housekeeping.make_sure_of_room(6, CheckpointKind.FULL, folder.store)
    housekeeping.spared = lambda identity: STILL_BYTES if identity == folder.store.identity else 0
    housekeeping.make_sure_of_room(6, CheckpointKind.FULL, folder.store)


def test_the_step_whose_files_are_shared_next_stays_even_with_nan(folder: Folder) -> None:
    housekeeping = Housekeeping(KeepLatest(1), lambda event: None)
    housekeeping.note_committed(folder.store.get(2), folder.store)
    folder.save(6)
    housekeeping.purge(folder.store, protected=frozenset)
    assert 2 in folder.steps()


def test_every_checkpoint_with_a_file_is_named_in_order(folder: Folder) -> None:
    folder.save(10, 1)
    folder.store.quarantine(2, ["damaged"])
    path = folder.store.root / layout.step_dir(1) / STILL
    assert others_with(path) == ["step-3", "step-10", "step-2.corrupt"]
    assert others_with(path.with_name(CHANGES)) == []
    assert others_with(path.with_name("missing")) == []
