"""What a process gives to the keeper, another one gets, also after the first was killed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from torchtitan_lite.errors import KeeperUnavailable
from torchtitan_lite.memory.keeper.client import Keeper

Image = tuple[int, int]


def test_without_a_keeper_there_is_nothing_and_nothing_to_end(runtime: Path, tmp_path: Path) -> None:
    keeper = Keeper(tmp_path, 600.0, runtime=runtime)
    assert keeper.held() == []
    assert keeper.describe() is None
    assert keeper.wait_until_unmapped(0.0, "")
    assert keeper.end() == ()
    keeper.drop(["a"])
    keeper.leave()
    keeper.finish()
    with pytest.raises(KeeperUnavailable, match="no keeper is running"):
        keeper.join("start")
    assert not (runtime / "torchtitan_lite").exists()


def test_what_is_kept_is_held_until_it_is_dropped(keeper: Keeper, image: Image) -> None:
    keeper.keep("a", image)
    keeper.keep("b", image)
    found = keeper.held()
    assert [each.name for each in found] == ["a", "b"]
    assert os.path.sameopenfile(found[0].arena_fd, image[0])
    assert os.path.sameopenfile(found[0].mark_fd, image[1])
    for each in found:
        assert not os.get_inheritable(each.arena_fd)
        each.close()
    keeper.drop(["b", "unknown"])
    (left,) = keeper.held()
    assert left.name == "a"
    left.close()


def test_a_process_is_mapped_by_another_start_until_it_has_left(keeper: Keeper, image: Image) -> None:
    keeper.join("first")
    keeper.keep("a", image)
    for start, is_mapped in (("first", False), ("second", True)):
        (found,) = keeper.held(start)
        assert found.is_mapped == is_mapped
        found.close()
    assert keeper.wait_until_unmapped(0.0, "first")
    assert not keeper.wait_until_unmapped(0.0, "second")
    keeper.leave()
    assert keeper.wait_until_unmapped(0.0, "second")


def test_no_one_waits_for_the_end_of_its_own_process(keeper: Keeper, runtime: Path) -> None:
    keeper.join("first")
    again = Keeper(keeper.folder, 600.0, runtime=runtime)  # Of another manager, as in a notebook.
    with ended_after(20.0):
        assert not again.wait_until_unmapped(3600.0, "second")


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Fail if the block waits for so long."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_a_wait_for_another_start_ends_at_its_limit(keeper: Keeper) -> None:
    with subprocess.Popen(["sleep", "5"]) as of_first:  # So long lasts a wait without an end.
        keeper.join("first", also=[of_first.pid])
        keeper.leave()
        assert not keeper.wait_until_unmapped(0.0, "second")
        of_first.kill()
    assert keeper.wait_until_unmapped(30.0, "second")
