"""What a start finds at the keepers: which images are complete, what is no image, and which memory it takes over."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.images.cards import CARD, changed
from tests.descriptors import num_open, num_open_of, wait_for_open
from tests.keepers import names_at
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint.staging.mark import Mark, read_mark
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.memory.images.card import Card, ImageKey
from torchtitan_lite.memory.images.held_images import HeldImages
from torchtitan_lite.memory.images.tier import TakenOver
from torchtitan_lite.memory.keeper.client import Keeper
from torchtitan_lite.store.manifest import Table

DATA = b"abc"
SEAL_WRITE = 0x8


@pytest.fixture
def keeper(memory_tier: Path, tmp_path: Path) -> Iterator[Keeper]:
    keeper = Keeper(tmp_path, 600.0, runtime=memory_tier)
    keeper.start()
    yield keeper
    keeper.end()


MEMORIES = ("arena", "torchtitan_lite-staging", "torchtitan_lite-mark")


def card(step: int, rank: int = 0, *, world_size: int = 1, **changes: Any) -> Card:
    own = {"file": f"__{rank}_0.distcp", "objects": Table({f"state.{rank}": {"value": 1}})}
    tables = {} if rank == 0 else {"tensors": None, "structure": None}
    return changed(CARD, step=step, rank=rank, world_size=world_size, **{**own, **tables, **changes})


def keep(
    keeper: Keeper, of: Card | None, name: str = "", *, num_bytes: int = 3, size: int = 4096, **marked: Any
) -> int:
    """Have `keeper` hold an arena of `size` bytes with the image that `of` describes; return its inode.

    `marked` are other values for its mark; without `of` it says nothing.
    """
    arena = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(arena, size)
    os.pwrite(arena, DATA[:size], 0)
    mark = Mark()
    if of is not None:
        mark.set(**{"step": of.key.step, "num_bytes": num_bytes, "card": of.to_bytes(), **marked})
        name = name or f"{of.key.start}.{of.rank}.{of.key.step}"
    if size == 4097:
        fcntl.fcntl(arena, fcntl.F_ADD_SEALS, SEAL_WRITE)
    keeper.keep(name, (arena, mark.fd))
    inode = os.fstat(arena).st_ino
    os.close(arena)
    mark.close()
    return inode


def look(keeper: Keeper | None, topology: str = "2 ranks", peers: Peers | None = None) -> HeldImages:
    found = HeldImages(keeper, "now", peers or Peers(timedelta(seconds=60)))
    found.look(topology=topology)
    return found


def keys(found: HeldImages) -> list[ImageKey]:
    return [each.image.key for each in found.complete]


@contextmanager
def taken(found: HeldImages, loaded: ImageKey | None) -> Iterator[tuple[list[int], list[int | None], list[str]]]:
    """Yield the inodes that this rank is to own, the step that the mark of each says, and the names."""
    pairs, names, *_ = found.shared_out(loaded)
    marked = [read_mark(mark) for _, mark in pairs]
    try:
        yield [os.fstat(arena).st_ino for arena, _ in pairs], [each and each.step for each in marked], names
    finally:
        for fd in [fd for pair in pairs for fd in pair]:
            os.close(fd)


def test_the_images_of_all_steps_are_complete_and_the_latest_one_is_first(keeper: Keeper) -> None:
    for step in (5, 7, 6):
        keep(keeper, card(step))
    before = num_open()
    found = look(keeper)
    assert keys(found) == [ImageKey(7, "a1", 0), ImageKey(6, "a1", 0), ImageKey(5, "a1", 0)]
    assert found.are_any
    best = found.complete[0]
    assert (best.image.key.step, best.manifest.step, best.is_spread) == (7, 7, False)
    files = found.files(best.image.key, best.manifest, is_spread=False)
    assert files.sizes_of(["__0_0.distcp", "unknown"]) == {"__0_0.distcp": 3}
    assert files.share(["a", "b", "c"], 1, 2) == ["b"]
    with files.opened("__0_0.distcp") as fd:
        assert os.pread(fd, 3, 0) == DATA
    with (
        pytest.raises(FileNotFoundError, match=r"__9_0\.distcp is in the memory of another host"),
        files.opened("__9_0.distcp"),
    ):
        pass
    files.verify(0, 1)
    files.close()
    found.close()
    found.close()
    wait_for_open(before)


def test_images_are_complete_with_those_of_all_ranks_of_one_start(keeper: Keeper) -> None:
    keep(keeper, card(7, 0, world_size=2))
    keep(keeper, card(7, 1, world_size=2, start="b2"))
    keep(keeper, card(8, 1, world_size=2))
    keep(keeper, card(6, 0, world_size=2))
    keep(keeper, card(6, 1, world_size=2))
    found = look(keeper)
    assert keys(found) == [ImageKey(6, "a1", 0)]
    found.close()


def test_images_that_do_not_fit_together_leave_those_before_to_the_load(
    keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    for step, topology in ((6, "2 ranks"), (7, "other")):
        keep(keeper, card(step, 0, world_size=2))
        keep(keeper, card(step, 1, world_size=2, topology=topology))
    found = look(keeper)
    assert keys(found) == [ImageKey(6, "a1", 0)]
    assert "The in-memory snapshots of step 7 are ignored: rank 1: topology" in caplog.text
    found.close()


def test_what_is_no_image_is_counted_in_one_line(keeper: Keeper, caplog: pytest.LogCaptureFixture) -> None:
    keep(keeper, None, "empty")
    keep(keeper, card(5))
    keep(keeper, card(6), "a", step=7)
    keep(keeper, card(6), "b", num_bytes=4097)
    keep(keeper, card(6), "c", num_bytes=2)
    keep(keeper, card(6), "d", card=b"none")
    found = look(keeper)
    assert keys(found) == [ImageKey(5, "a1", 0)]
    (line,) = [record.getMessage() for record in caplog.records if "unusable in-memory snapshot" in record.getMessage()]
    assert (
        line == "Ignored 4 unusable in-memory snapshots, such as a: its valid flag is of step 7, its header of step 6"
    )
    found.close()


@pytest.mark.parametrize(("num_bytes", "size"), [(3, 3), (3, 4), (4, 4)])
def test_an_image_may_fill_its_arena_and_have_more_than_its_file(keeper: Keeper, num_bytes: int, size: int) -> None:
    keep(keeper, card(7), num_bytes=num_bytes, size=size)
    found = look(keeper)
    assert keys(found) == [ImageKey(7, "a1", 0)]
    found.close()


def test_without_a_keeper_there_is_nothing_to_load_and_nothing_to_take_over(memory_tier: Path, tmp_path: Path) -> None:
    for keeper in (None, Keeper(tmp_path, 600.0, runtime=memory_tier)):
        found = look(keeper)
        assert not found.are_any and not found.complete
        assert found.shared_out(None) == TakenOver([], [])


def test_images_that_another_manager_of_this_process_can_change_are_not_used(
    keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    keep(keeper, card(7))
    keeper.join("another")
    before = num_open()
    found = look(keeper)
    assert not found.are_any and not found.complete
    wait_for_open(before)
    assert caplog.text.count("In-memory snapshots are not used") == 1
    keeper.leave()


def test_what_was_loaded_is_taken_over_first_then_earlier_images_and_the_others_are_no_images_any_more(
    keeper: Keeper,
) -> None:
    inodes = {step: keep(keeper, card(step)) for step in (5, 6, 7, 8)}
    inodes[9] = keep(keeper, card(5, start="b2"))
    found = look(keeper)
    found.left_out.add(ImageKey(5, "a1", 0))
    with taken(found, ImageKey(7, "a1", 0)) as (owned, steps, names):
        assert owned[:2] == [inodes[7], inodes[6]]
        assert set(owned[2:]) == {inodes[5], inodes[8], inodes[9]}
        assert steps == [7, 6, None, None, None]
        assert sorted(names) == names_at(keeper) == ["a1.0.5", "a1.0.6", "a1.0.7", "a1.0.8", "b2.0.5"]


def test_at_most_three_arenas_without_a_useful_image_are_taken_over_and_the_others_dropped(keeper: Keeper) -> None:
    for step in range(1, 7):
        keep(keeper, card(step))
    found = look(keeper)
    with taken(found, None) as (owned, steps, names):
        assert len(owned) == 3 and steps == [None] * 3
        assert sorted(names) == names_at(keeper)


@pytest.mark.parametrize("size", [0, 4097])
def test_an_arena_that_cannot_be_written_is_dropped(keeper: Keeper, size: int) -> None:
    """Of no bytes, or sealed."""
    keep(keeper, None, "bad", size=size)
    keep(keeper, None, "good", size=1)
    found = look(keeper)
    with taken(found, None) as (owned, _, names):
        assert (len(owned), names) == (1, ["good"])
        assert names_at(keeper) == ["good"]


def test_memory_with_several_names_is_taken_over_once_and_dropped_with_all_of_them(keeper: Keeper) -> None:
    for step in (6, 7, 8, 9, 10):
        keep(keeper, card(step))
    held = keeper.held()
    for each in held:
        keeper.keep(f"z{each.name}", (each.arena_fd, each.mark_fd))
        each.close()
    before = num_open()
    found = look(keeper)
    assert len(keys(found)) == 5
    with taken(found, ImageKey(6, "a1", 0)) as (owned, steps, names):
        assert len(owned) == len({*owned}) == 4
        assert steps == [6, None, None, None]
        assert len(names) == 8 and names_at(keeper) == sorted(names)
    wait_for_open(before)


@contextmanager
def hosts(folder: Path, rank: int, *, shared: bool) -> Iterator[tuple[Keeper, Peers]]:
    """Yield a keeper for each rank, as on a host of its own, or one that both share, and the ranks."""
    peers = Peers(timedelta(seconds=60))
    number = 0 if shared else rank
    runtime = Path(tempfile.gettempdir()) / f"ttl-held-{os.getppid()}-{folder.parent.name[-3:]}-{number}"
    runtime.mkdir(mode=0o700, exist_ok=True)
    keeper = Keeper(folder, 60.0, runtime=runtime)
    keeper.start()
    try:
        yield keeper, peers
    finally:
        peers.gather(None)
        keeper.end()
        shutil.rmtree(runtime, ignore_errors=True)


def loaded_by(found: HeldImages) -> Collection[ImageKey]:
    return found.peers.on_coordinator(lambda: keys(found))


@on_two_ranks
def test_images_of_two_hosts_count_where_each_rank_has_its_own(rank: int, tmp_path: Path) -> None:
    with hosts(tmp_path, rank, shared=False) as (keeper, peers):
        keep(keeper, card(7, rank, world_size=2))
        keep(keeper, card(8, 1 - rank, world_size=2))  # The ranks are on other hosts now.
        found = look(keeper, peers=peers)
        assert loaded_by(found) == [ImageKey(8, "a1", 0), ImageKey(7, "a1", 0)]
        manifest = peers.on_coordinator(lambda: found.complete[1].manifest)
        assert peers.on_coordinator(lambda: found.complete[0].is_spread)
        files = found.files(ImageKey(7, "a1", 0), manifest, is_spread=True)
        assert files.share(sorted(manifest.files), 0, 1) == [f"__{rank}_0.distcp"]
        files.close()
        with taken(found, ImageKey(7, "a1", 0)) as (_, steps, names):
            assert (steps, names) == ([7, None], [f"a1.{rank}.7", f"a1.{1 - rank}.8"])
        other = look(keeper, "another", peers)
        assert not loaded_by(other), "of several hosts the topology must be the same"
        other.close()


@on_two_ranks
def test_a_rank_receives_its_image_from_the_host_that_has_it(rank: int, tmp_path: Path) -> None:
    with hosts(tmp_path, rank, shared=False) as (keeper, peers):
        keep(keeper, card(7, rank, world_size=2))
        keep(keeper, card(8, 1 - rank, world_size=2))
        before = num_open_of(*MEMORIES)
        found, key = look(keeper, peers=peers), ImageKey(8, "a1", 0)
        found.fetch(key)
        manifest = peers.on_coordinator(lambda: found.complete[0].manifest)
        files = found.files(key, manifest, is_spread=True)
        (own,) = files.share(sorted(manifest.files), 0, 1)
        with files.opened(own) as fd:
            assert os.pread(fd, 3, 0) == DATA[:3]
        files.close()
        with taken(found, key) as (_, steps, names):
            assert steps == [8, 7, None], "what was received comes first, and has no name yet"
            assert names == [f"a1.{rank}.7", f"a1.{1 - rank}.8"], "the other rank's memory is used again"
        assert num_open_of(*MEMORIES) == before


@on_two_ranks
def test_what_was_received_and_not_loaded_is_given_up(rank: int, tmp_path: Path) -> None:
    with hosts(tmp_path, rank, shared=False) as (keeper, peers):
        keep(keeper, card(7, rank, world_size=2))
        keep(keeper, card(8, 1 - rank, world_size=2))
        before = num_open_of(*MEMORIES)
        found = look(keeper, peers=peers)
        found.fetch(ImageKey(8, "a1", 0))
        with taken(found, ImageKey(7, "a1", 0)) as (_, steps, _):
            assert steps == [7, None]
        assert num_open_of(*MEMORIES) == before


@on_two_ranks
def test_an_empty_host_receives_the_replica_that_stays_at_the_other_one(rank: int, tmp_path: Path) -> None:
    with hosts(tmp_path, rank, shared=False) as (keeper, peers):
        if rank == 0:
            keep(keeper, card(7, 0, world_size=2))
            keep(keeper, card(7, 1, world_size=2), "a1.replica.1.x")
        found, key = look(keeper, peers=peers), ImageKey(7, "a1", 0)
        assert loaded_by(found) == [key]
        found.fetch(key)
        taken_over = found.shared_out(key)
        assert taken_over.names == (["a1.0.7"] if rank == 0 else [])
        assert taken_over.num_loaded == 1
        assert taken_over.replica_bytes == (4096 if rank == 0 else 0)
        assert names_at(keeper) == (["a1.0.7", "a1.replica.1.x"] if rank == 0 else [])
        for fd in [fd for pair in taken_over.arenas for fd in pair]:
            os.close(fd)


@on_two_ranks
def test_the_ranks_of_a_host_share_its_memory_out_by_who_wrote_it(rank: int, tmp_path: Path) -> None:
    with hosts(tmp_path, rank, shared=True) as (keeper, peers):
        if rank == 0:
            for writer in (0, 1, 2):
                keep(keeper, card(7, writer, world_size=3))
            for name in ("y", "z"):  # No image, so each rank gets one of them.
                keep(keeper, None, name)
        peers.gather(None)
        found = look(keeper, "another", peers)
        assert loaded_by(found) == [ImageKey(7, "a1", 0)], "one host has all, so the topology may be another one"
        assert not peers.on_coordinator(lambda: found.complete[0].is_spread)
        with taken(found, ImageKey(7, "a1", 0)) as (owned, _, names):
            of_ranks = peers.gather((owned, names))
        assert [names for _, names in of_ranks] == [["a1.0.7", "a1.2.7", "z"], ["a1.1.7", "y"]]
        assert len({inode for owned, _ in of_ranks for inode in owned}) == 5


def test_a_look_says_of_a_keeper_that_is_stopped_which_process_it_is_and_that_the_disk_is_next(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep(keeper, card(5))
    described = keeper.describe()
    assert described is not None
    monkeypatch.setattr("torchtitan_lite.memory.keeper.client.ANSWER_SECONDS", 0.05)
    os.kill(described.pid, signal.SIGSTOP)
    try:
        found = look(keeper)
    finally:
        os.kill(described.pid, signal.SIGCONT)
    assert not found.complete
    monkeypatch.undo()
    assert caplog.messages == [
        f"In-memory snapshots are not used: the keeper (process {described.pid}) did not answer within 0.05 s: it is "
        "stopped, or this machine is too busy. Loading from disk"
    ]
    found = look(keeper)
    assert keys(found) == [ImageKey(5, "a1", 0)], "they are still there"
    found.close()
