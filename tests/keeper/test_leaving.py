"""A process that has left its keeper watches it no more."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.descriptors import num_open, wait_for_open
from tests.keepers import has_ended
from torchtitan_lite.memory.keeper.client import Keeper


@pytest.mark.parametrize("leave", [Keeper.leave, Keeper.finish])
def test_who_has_left_or_finished_knows_of_no_end_and_has_nothing_open(
    keeper: Keeper, leave: Callable[[Keeper], None]
) -> None:
    before = num_open()
    described = keeper.describe()
    assert described is not None and not keeper.has_ended()
    for _ in range(2):
        keeper.join("first")
    wait_for_open(before + 1)
    assert not keeper.has_ended()
    leave(keeper)
    wait_for_open(before)
    keeper.end()
    assert has_ended(described.pid)
    assert not keeper.has_ended()


def test_who_has_joined_knows_that_it_has_ended_until_it_joins_another_one(keeper: Keeper) -> None:
    keeper.join("first")
    described = keeper.describe()
    assert described is not None
    os.kill(described.pid, 9)
    assert has_ended(described.pid)
    assert keeper.has_ended()
    keeper.start()
    assert keeper.has_ended(), "it has not joined this one"
    keeper.join("first")
    assert not keeper.has_ended()
