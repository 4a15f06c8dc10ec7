"""Complete runs, drawn at random: whatever befalls them, no step that was promised is lost, and none is another one.

By hand, as many as you like: `python -m tests.e2e.random_runs --seed 0 --runs 100`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.drawn_run import draw
from tests.e2e.killed_jobs import Tally, printed
from tests.e2e.random_runs import carry_out, new_tally

FEW = (79, 112, 143)
"""Seeds whose runs make images: with a rollback, damage, a keeper that is killed, a signal."""
MANY, MORE = 12, 18
"""Runs of the slow tests, and those that --exhaustive adds. A failure prints its run, with the seed."""


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    with printed(request, new_tally()) as counts:
        yield counts


@pytest.mark.slow
@pytest.mark.parametrize("seed", FEW)
def test_a_run_of_one_rank_loses_nothing_and_is_the_straight_run(
    seed: int, tmp_path: Path, memory_tier: Path, tally: Tally
) -> None:
    carry_out(draw(seed, ranks=(1,), most_legs=3), tmp_path / "run", memory_tier, tally)


@pytest.mark.promise(
    "Runs drawn at random, with kills, rollbacks, deletions, damage and other numbers of ranks, lose nothing "
    "and have the losses of an uninterrupted run.",
    section="crash",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [*range(MANY), *(pytest.param(MANY + more, marks=pytest.mark.exhaustive) for more in range(MORE))]
)
def test_a_run_loses_nothing_and_is_the_straight_run(
    number: int, tmp_path: Path, memory_tier: Path, tally: Tally, pytestconfig: pytest.Config
) -> None:
    carry_out(draw(pytestconfig.getoption("--seed") + number), tmp_path / "run", memory_tier, tally)


def test_equal_seeds_draw_equal_runs() -> None:
    assert [draw(seed) for seed in range(20)] == [draw(seed) for seed in range(20)]
    assert len({repr(draw(seed)) for seed in range(20)}) == 20
