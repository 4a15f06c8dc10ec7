"""Housekeeping around the saves: room before a save, purges after it, and a known good checkpoint that stays."""

from __future__ import annotations

import errno
import gc
import os
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.store.filled import commit, save, staged
from torchtitan_lite import faults
from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.errors import LeaseLost, SaveFailed
from torchtitan_lite.events import Event
from torchtitan_lite.store import layout
from torchtitan_lite.store.housekeeping import Housekeeping
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind
from torchtitan_lite.store.retention import KeepAll, KeepFor, KeepLatest, Ruling
from torchtitan_lite.store.store import CheckpointStore

FULL, WEIGHTS_ONLY = CheckpointKind.FULL, CheckpointKind.WEIGHTS_ONLY
METADATA = b"of dcp"


class Disk(Durable):
    """Fails an operation if `fails` returns True for it and its path; syncs nothing."""

    def __init__(self) -> None:
        self.fails: Callable[[str, str], bool] = lambda operation, name: False

    def rename(self, src: Path, dst: Path) -> None:
        if self.fails("rename", src.name):
            raise OSError(errno.EIO, "Input/output error", str(src))
        super().rename(src, dst)

    def remove_tree(self, path: Path) -> None:
        if self.fails("remove_tree", path.name):
            raise OSError(errno.EIO, "Input/output error", str(path))
        super().remove_tree(path)

    def fsync_dir(self, path: Path) -> None:
        if self.fails("fsync_dir", path.name):
            raise OSError(errno.EIO, "Input/output error", str(path))

    def fsync_file(self, fd: int) -> None: ...


class Folder:
    """A folder of checkpoints on a disk of `capacity` bytes, of which only files of ranks take some."""

    def __init__(self, root: Path, capacity: int = 1 << 30) -> None:
        self.disk = Disk()
        self.capacity = capacity
        self.store = CheckpointStore(root, durable=self.disk, free_bytes=self.free_bytes)

    def free_bytes(self, folder: Path) -> int:
        return self.capacity - sum(path.stat().st_size for path in folder.rglob("*") if "__" in path.name)

    def save(self, step: int, num_bytes: int = 100, kind: CheckpointKind = FULL) -> CheckpointInfo:
        return commit(self.store, step, bytes(num_bytes), METADATA, kind=kind)

    def damage(self, step: int) -> None:
        (self.store.get(step).path / layout.data_file(0, 0)).unlink()

    def names(self) -> list[str]:
        return sorted(path.name for path in self.store.root.iterdir())


class Events:
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, dict[str, Any]]] = []

    def __call__(self, event: Event) -> None:
        self.seen.append((event.name, event.step, event.figures))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "checkpoint")


@pytest.fixture
def events() -> Events:
    return Events()


def test_a_checkpoint_that_the_policy_does_not_keep_is_removed_and_reported_with_its_size(
    folder: Folder, events: Events
) -> None:
    for step in (1, 2, 3):
        folder.save(step, num_bytes=step * 1000)
    Housekeeping(KeepLatest(1), events).purge(folder.store)
    assert folder.names() == ["step-3"]
    assert events.seen == [
        ("purged", 1, {"bytes": 1000 + len(METADATA)}),
        ("purged", 2, {"bytes": 2000 + len(METADATA)}),
    ]


def test_a_checkpoint_with_a_missing_file_is_neither_counted_nor_removed(folder: Folder, events: Events) -> None:
    for step in (1, 2, 3):
        folder.save(step)
    folder.damage(3)
    Housekeeping(KeepLatest(1), events).purge(folder.store)
    assert folder.names() == ["step-2", "step-3"]


def test_the_latest_checkpoint_known_to_be_good_stays_and_older_ones_do_not(folder: Folder, events: Events) -> None:
    housekeeping = Housekeeping(KeepLatest(1), events)
    for step in (1, 2, 3, 4):
        folder.save(step)
    for step in (2, 1):
        housekeeping.note_good(step)
    housekeeping.purge(folder.store)
    assert folder.names() == ["step-2", "step-4"]


def test_a_checkpoint_that_this_run_committed_is_known_to_be_good(folder: Folder, events: Events) -> None:
    housekeeping = Housekeeping(KeepLatest(1), events)
    housekeeping.note_committed(folder.save(1), folder.store)
    for step in (2, 3):
        folder.save(step)
    housekeeping.purge(folder.store)
    assert folder.names() == ["step-1", "step-3"]


def test_an_export_that_this_run_committed_does_not_count_as_a_known_good_checkpoint(
    folder: Folder, events: Events
) -> None:
    """This run exported step 2, and another one saved it in full later."""
    housekeeping = Housekeeping(KeepLatest(1), events)
    housekeeping.note_committed(folder.save(1), folder.store)
    housekeeping.note_committed(folder.save(2, kind=WEIGHTS_ONLY), folder.store)
    for step in (2, 3):
        folder.save(step)
    housekeeping.purge(folder.store)
    assert folder.names() == ["step-1", "step-2.weights", "step-3"]


def test_a_save_with_enough_room_removes_nothing(folder: Folder, events: Events) -> None:
    housekeeping = Housekeeping(KeepLatest(1), events)
    for step in (1, 2):
        folder.save(step)
    housekeeping.make_sure_of_room(3, FULL, folder.store)
    assert folder.names() == ["step-1", "step-2"]


def test_with_too_little_room_superfluous_checkpoints_are_removed_before_the_save(
    tmp_path: Path, events: Events
) -> None:
    folder = Folder(tmp_path, capacity=3 * 1000 + 50)
    housekeeping = Housekeeping(KeepLatest(1), events)
    for step in (1, 2):
        folder.save(step, num_bytes=1000)
    housekeeping.make_sure_of_room(3, FULL, folder.store)
    assert folder.names() == ["step-1", "step-2"]
    folder.save(3, num_bytes=1000)
    housekeeping.make_sure_of_room(4, FULL, folder.store)
    assert folder.names() == ["step-3"]
    assert [(event, step) for event, step, _ in events.seen] == [("purged", 1), ("purged", 2)]


def test_leftovers_of_a_cut_save_go_before_checkpoints(tmp_path: Path, events: Events) -> None:
    folder = Folder(tmp_path, capacity=2 * 1000 + 500)
    there: list[list[str]] = []

    class Watched(KeepLatest):
        """Notes what is there when it rules which checkpoints may go."""

        def rulings(self, full: Sequence[CheckpointInfo], now: float) -> list[Ruling]:
            there.append(folder.names())
            return super().rulings(full, now)

    for step in (1, 2):
        folder.save(step, num_bytes=1000)
    staged(folder.store, 3)
    Housekeeping(Watched(1), events).make_sure_of_room(4, FULL, folder.store)
    assert there[0] == ["step-1", "step-2"] and folder.names() == ["step-2"]


def test_a_folder_that_is_lost_while_room_is_made_keeps_what_is_there(tmp_path: Path, events: Events) -> None:
    folder = Folder(tmp_path, capacity=3 * 1000 + 50)
    housekeeping = Housekeeping(KeepLatest(1), events)
    for step in (1, 2, 3):
        folder.save(step, num_bytes=1000)
    looks = count()

    def fence() -> None:
        if next(looks):
            raise LeaseLost(str(tmp_path), "another job has it")

    folder.store.check_lease = fence  # type: ignore[method-assign]
    with pytest.raises(LeaseLost):
        housekeeping.make_sure_of_room(4, FULL, folder.store)
    assert folder.names() == ["step-1", "step-2", "step-3"]


def test_what_a_failed_save_left_stays_in_a_folder_that_was_lost(folder: Folder, events: Events) -> None:
    folder.save(1)
    place = folder.store.begin(2)

    def fence() -> None:
        raise LeaseLost(str(folder.store.root), "another job has it")

    folder.store.check_lease = fence  # type: ignore[method-assign]
    Housekeeping(KeepAll(), events).remove_failed_save(2, folder.store, place)
    assert folder.names() == ["step-1", place]


def test_a_save_without_room_is_refused_and_no_kept_checkpoint_is_removed(tmp_path: Path, events: Events) -> None:
    folder = Folder(tmp_path, capacity=2 * 1000 + 50)
    for step in (1, 2):
        folder.save(step, num_bytes=1000)
    sizes = "has room for 50 B, and the last save took 1006 B"
    with pytest.raises(SaveFailed, match=rf"save of step 3 failed.*{sizes}; .*keep_lat"):
        Housekeeping(KeepAll(), events).make_sure_of_room(3, FULL, folder.store)
    assert folder.names() == ["step-1", "step-2"]


@pytest.mark.parametrize("fits", [True, False])
def test_a_save_needs_as_much_room_as_the_last_checkpoint_of_its_kind(
    tmp_path: Path, events: Events, fits: bool
) -> None:
    """Sizes of another kind, an older step or another folder do not count."""
    needed = {FULL: 2000 + len(METADATA), WEIGHTS_ONLY: 500 + len(METADATA)}
    other = Folder(tmp_path / "other")
    for kind, room in needed.items():
        folder = Folder(tmp_path / kind.value, capacity=10_000)
        housekeeping = Housekeeping(KeepAll(), events)
        housekeeping.note_committed(other.save(9, num_bytes=30_000, kind=kind), other.store)
        folder.save(1, num_bytes=3000)
        folder.save(2, num_bytes=700, kind=WEIGHTS_ONLY)
        folder.save(3, num_bytes=2000)
        folder.save(4, num_bytes=500, kind=WEIGHTS_ONLY)
        folder.capacity -= folder.free_bytes(folder.store.root) - room + (not fits)
        if fits:
            housekeeping.make_sure_of_room(5, kind, folder.store)
        else:
            with pytest.raises(SaveFailed):
                housekeeping.make_sure_of_room(5, kind, folder.store)


def test_the_size_of_the_last_commit_is_remembered_and_not_read_again(folder: Folder, events: Events) -> None:
    housekeeping = Housekeeping(KeepAll(), events)
    housekeeping.note_committed(folder.save(1, num_bytes=1000), folder.store)
    housekeeping.make_sure_of_room(2, FULL, folder.store)
    housekeeping.note_committed(folder.save(2, num_bytes=5000), folder.store)
    folder.capacity -= folder.free_bytes(folder.store.root) - 5000
    with pytest.raises(SaveFailed, match=r"the last save took 4\.9 KiB"):
        housekeeping.make_sure_of_room(3, FULL, folder.store)


def test_the_first_save_of_a_folder_needs_no_room(tmp_path: Path, events: Events) -> None:
    folder = Folder(tmp_path / "checkpoint", capacity=0)
    Housekeeping(KeepAll(), events).make_sure_of_room(1, FULL, folder.store)


def test_a_checkpoint_that_cannot_be_removed_is_a_warning_and_the_others_are_removed(
    folder: Folder, events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        folder.save(step)
    folder.disk.fails = lambda operation, name: (operation, name) == ("rename", "step-1")
    Housekeeping(KeepLatest(1), events).purge(folder.store)
    assert folder.names() == ["step-1", "step-3"]
    assert [step for _, step, _ in events.seen] == [2]
    assert "step-1, which is no longer kept" in caplog.text


def test_a_folder_that_cannot_be_listed_is_a_warning_and_nothing_is_removed(
    folder: Folder, events: Events, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for step in (1, 2):
        folder.save(step)
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refuse)
        Housekeeping(KeepLatest(1), events).purge(folder.store)
    assert folder.names() == ["step-1", "step-2"]
    assert "Could not list" in caplog.text


def test_a_failed_save_leaves_nothing(folder: Folder, events: Events) -> None:
    folder.save(1)
    place = folder.store.begin(2)
    (folder.store.root / place / layout.data_file(0, 0)).write_bytes(b"half")
    Housekeeping(KeepAll(), events).remove_failed_save(2, folder.store, place)
    assert folder.names() == ["step-1"]


def test_leftovers_of_a_failed_save_that_cannot_be_removed_are_a_warning(
    folder: Folder, events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    place = folder.store.begin(2)
    folder.disk.fails = lambda operation, name: operation == "remove_tree"
    Housekeeping(KeepAll(), events).remove_failed_save(2, folder.store, place)
    assert folder.names() == [place]
    assert "step 2" in caplog.text and "Input/output error" in caplog.text


def test_the_fault_points_preflight_and_purge_are_passed_with_their_step(
    folder: Folder, events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    housekeeping = Housekeeping(KeepLatest(1), events)
    for step in (1, 2, 3):
        folder.save(step)
    faults.install("slow@preflight:step=4,seconds=0; slow@purge:step=2,seconds=0,times=always", rank=0)
    caplog.clear()
    housekeeping.make_sure_of_room(4, FULL, folder.store)
    housekeeping.purge(folder.store)
    happened = [message.partition("happens here: ")[2] for message in caplog.messages]
    assert happened == ["slow@preflight:step=4,seconds=0", "slow@purge:step=2,seconds=0,times=always"]


def test_a_removal_that_fails_leaves_the_others_to_be_removed_and_says_which_stays(
    folder: Folder, events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3, 4):
        folder.save(step)
    faults.install("EIO@purge:step=2", rank=0)
    Housekeeping(KeepLatest(1), events).purge(folder.store)
    assert folder.names() == ["step-2", "step-4"]
    assert "step-2, which is no longer kept: " in caplog.text


def test_a_disk_with_too_little_free_space_loses_the_oldest_until_there_is_enough(
    folder: Folder, events: Events
) -> None:
    for step in (1, 2, 3, 4, 5):
        folder.save(step)
    folder.capacity = 600
    Housekeeping(KeepLatest(4), events, min_free_bytes=300).purge(folder.store)
    assert folder.names() == ["step-3", "step-4", "step-5"]
    assert folder.free_bytes(folder.store.root) == 300
    Housekeeping(KeepAll(), events, min_free_bytes=10**9).purge(folder.store)
    assert folder.names() == ["step-5"]


def test_enough_free_space_removes_nothing(folder: Folder, events: Events) -> None:
    folder.save(1)
    folder.save(2)
    folder.capacity = 500
    Housekeeping(KeepAll(), events, min_free_bytes=300).purge(folder.store)
    assert folder.names() == ["step-1", "step-2"]


def test_a_checkpoint_that_is_too_old_is_removed(folder: Folder, events: Events) -> None:
    folder.save(1)
    folder.save(2)
    at = [1.0 + 2 * 3600]
    housekeeping = Housekeeping(KeepFor(2.0), events, now=lambda: at[0])
    housekeeping.purge(folder.store)
    assert folder.names() == ["step-1", "step-2"]
    at[0] += 1
    housekeeping.purge(folder.store)
    assert folder.names() == ["step-2"]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_saves(tmp_path: Path) -> None:
    store, housekeeping = CheckpointStore(tmp_path), Housekeeping(KeepLatest(2), lambda event: None)

    def save_until(last: int) -> int:
        for step in range(store.latest().step + 1 if store.latest() else 1, last + 1):
            housekeeping.note_committed(save(store, step), store)
            housekeeping.purge(store)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = save_until(100)
        grown = save_until(400) - before
    finally:
        tracemalloc.stop()
    assert grown < 300 * 50, f"{grown / 300:.0f} bytes a save"
