"""The shuffle is a bijection, looks random and never changes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from torchtitan_lite.data.loader import shuffled

SEEDS = st.integers(0, 2**63 - 1)


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(1, 700), SEEDS, st.integers(0, 1000))
def test_each_element_comes_exactly_once(size: int, seed: int, epoch: int) -> None:
    order = [shuffled(position, size=size, seed=seed, epoch=epoch) for position in range(size)]
    assert sorted(order) == list(range(size))


@settings(deadline=None)
@given(st.integers(1, 10**15), SEEDS, st.data())
def test_any_position_of_a_huge_range_stays_in_the_range(size: int, seed: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, size - 1))
    assert 0 <= shuffled(position, size=size, seed=seed, epoch=0) < size


def test_each_seed_and_each_epoch_has_its_own_order() -> None:
    orders = {
        tuple(shuffled(position, size=100, seed=seed, epoch=epoch) for position in range(100))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_positions_are_spread_evenly_over_the_elements() -> None:
    # Of 20 orders of 1000, the first 100 positions hold each decile of the elements about 200 times.
    deciles = [0] * 10
    for seed in range(20):
        for position in range(100):
            deciles[shuffled(position, size=1000, seed=seed, epoch=0) // 100] += 1
    assert all(150 < count < 250 for count in deciles), deciles


def test_neighbours_do_not_stay_neighbours() -> None:
    order = [shuffled(position, size=10_000, seed=3, epoch=0) for position in range(10_000)]
    assert sum(abs(a - b) == 1 for a, b in pairwise(order)) < 20


def test_the_order_of_a_seed_never_changes_between_versions() -> None:
    assert [shuffled(position, size=12, seed=7, epoch=1) for position in range(12)] == [
        11,
        6,
        5,
        4,
        1,
        7,
        8,
        2,
        3,
        9,
        0,
        10,
    ]
