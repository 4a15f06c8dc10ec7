"""The interval that is chosen from the cost of a save and the time between failures."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from torchtitan_lite.checkpoint.schedule.optimum import (
    Caps,
    Past,
    Reason,
    SaveCost,
    choose_interval,
    most_lost_seconds,
    mtbf_hours,
    optimum_seconds,
    prior_hours,
)

NO_CAPS = Caps()
SECONDS = st.floats(0, 1e5, allow_subnormal=False)
MTBF = st.floats(1, 1e9)
COSTS = st.builds(SaveCost, SECONDS, SECONDS, SECONDS, st.floats(0, 100))
FRACTION = st.floats(1e-4, 1)
CAPS = st.builds(Caps, st.just(math.inf) | st.floats(1, 1e6), st.just(math.inf) | FRACTION)
many = settings(max_examples=examples(500), deadline=None)


def at_most(low: float, high: float) -> bool:
    """Return whether `low` is not above `high`, but for rounding."""
    return low <= high * (1 + 1e-9) + 1e-9


def test_the_optimum_of_cheap_saves_is_youngs() -> None:
    assert optimum_seconds(1.0, 80_000.0) == pytest.approx(math.sqrt(2 * 1.0 * 80_000.0), rel=0.005)


@pytest.mark.parametrize("part", [1e-5, 1e-3, 0.02, 0.1, 0.5])
def test_the_optimum_is_the_one_of_the_exact_equation(part: float) -> None:
    """With failures at random, (1 - x) * exp(x) = exp(-part) holds at the best interval x * MTBF."""
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - middle) * math.exp(middle) > math.exp(-part) else (low, middle)
    assert optimum_seconds(part, 1.0) == pytest.approx(low, rel=0.02)


@many
@given(st.tuples(SECONDS, SECONDS), MTBF)
def test_dearer_saves_are_made_less_often(costs: tuple[float, float], mtbf: float) -> None:
    low, high = sorted(costs)
    assert at_most(optimum_seconds(low, mtbf), optimum_seconds(high, mtbf))


@many
@given(SECONDS, st.tuples(MTBF, MTBF))
def test_a_run_that_fails_less_often_is_saved_less_often(cost: float, mtbfs: tuple[float, float]) -> None:
    low, high = sorted(mtbfs)
    save = SaveCost(cost, save_seconds=cost)
    assert at_most(choose_interval(save, low, NO_CAPS).seconds, choose_interval(save, high, NO_CAPS).seconds)


@many
@given(COSTS, st.floats(1, 10), MTBF, CAPS)
def test_dearer_saves_that_take_as_long_are_made_less_often_within_the_caps(
    cost: SaveCost, factor: float, mtbf: float, caps: Caps
) -> None:
    dearer = dataclasses.replace(cost, slower_seconds=cost.slower_seconds * factor)
    assert at_most(choose_interval(cost, mtbf, caps).seconds, choose_interval(dearer, mtbf, caps).seconds)


@many
@given(COSTS, MTBF, CAPS)
def test_the_interval_is_never_below_the_time_that_a_save_takes(cost: SaveCost, mtbf: float, caps: Caps) -> None:
    chosen = choose_interval(cost, mtbf, caps).seconds
    assert chosen >= cost.save_seconds
    assert chosen >= cost.seconds
    assert math.isfinite(chosen)


@many
@given(COSTS, MTBF, CAPS)
def test_no_more_is_lost_than_allowed_unless_a_save_takes_too_long(cost: SaveCost, mtbf: float, caps: Caps) -> None:
    choice = choose_interval(cost, mtbf, caps)
    holds = at_most(most_lost_seconds(choice.seconds, cost), caps.max_lost_seconds)
    assert holds or (choice.exceeds and choice.reason is Reason.LEAST)
    if choice.exceeds and choice.reason is Reason.LEAST:
        assert choice.seconds == cost.least_interval


@many
@given(COSTS, MTBF, CAPS)
def test_saves_cost_no_more_than_allowed_unless_more_would_be_lost(cost: SaveCost, mtbf: float, caps: Caps) -> None:
    choice = choose_interval(cost, mtbf, caps)
    holds = at_most(cost.seconds / caps.max_overhead, choice.seconds)
    assert holds or choice.exceeds


@many
@given(COSTS, MTBF, CAPS)
def test_a_cap_changes_nothing_that_is_within_it(cost: SaveCost, mtbf: float, caps: Caps) -> None:
    free, choice = choose_interval(cost, mtbf, NO_CAPS), choose_interval(cost, mtbf, caps)
    assert not free.exceeds
    within = most_lost_seconds(free.seconds, cost) <= caps.max_lost_seconds
    if within and cost.seconds <= caps.max_overhead * free.seconds * (1 - 1e-9):
        assert at_most(choice.seconds, free.seconds) and at_most(free.seconds, choice.seconds)
        assert not choice.exceeds


SAVE = SaveCost(blocked_seconds=2.0, slower_seconds=1.0, save_seconds=10.0, step_seconds=0.5)


@pytest.mark.parametrize(
    ("caps", "seconds", "reason", "exceeds"),
    [
        (NO_CAPS, 733.0, Reason.OPTIMUM, False),
        (Caps(max_overhead=0.01), 733.0, Reason.OPTIMUM, False),
        (Caps(max_overhead=0.001), 3000.0, Reason.MAX_OVERHEAD, False),
        (Caps(max_lost_seconds=900), 733.0, Reason.OPTIMUM, False),
        (Caps(max_lost_seconds=113), 100.0, Reason.MAX_LOST, False),
        (Caps(max_lost_seconds=113, max_overhead=0.05), 100.0, Reason.MAX_LOST, False),
        (Caps(max_lost_seconds=113, max_overhead=0.02), 100.0, Reason.MAX_LOST, True),
        (Caps(max_lost_seconds=20, max_overhead=0.02), 10.0, Reason.LEAST, True),
        (Caps(max_lost_seconds=23), 10.0, Reason.MAX_LOST, False),
    ],
)
def test_what_may_be_lost_comes_before_what_saves_may_cost(
    caps: Caps, seconds: float, reason: Reason, exceeds: bool
) -> None:
    choice = choose_interval(SAVE, 90_000.0, caps)
    assert choice.seconds == pytest.approx(seconds, rel=0.01)
    assert (choice.reason, choice.exceeds) == (reason, exceeds)


def test_a_run_of_which_nothing_is_known_fails_as_often_as_its_prior_says() -> None:
    assert mtbf_hours(Past(), 40.0) == 40.0
    assert prior_hours(16_384) == pytest.approx(3.0, rel=0.01), "as Llama 3's run did"
    assert prior_hours(1) == pytest.approx(167.4, rel=0.01)


@many
@given(st.floats(0, 1e5), st.integers(0, 1000), st.floats(0.1, 1e4), st.floats(0, 1e4), st.integers(1, 10))
def test_hours_lengthen_the_estimate_and_failures_shorten_it(
    hours: float, ends: int, prior: float, more_hours: float, more_ends: int
) -> None:
    estimate = mtbf_hours(Past(hours, ends), prior)
    assert 0 < estimate < math.inf
    assert mtbf_hours(Past(hours + more_hours, ends), prior) >= estimate
    assert mtbf_hours(Past(hours, ends + more_ends), prior) < estimate


@many
@given(st.integers(1, 100_000), st.integers(1, 1000))
def test_more_ranks_fail_more_often(ranks: int, more: int) -> None:
    assert prior_hours(ranks + more) < prior_hours(ranks) < 168.0


@pytest.mark.parametrize("prior", [1.0, 10.0, 1000.0])
def test_the_estimate_converges_to_what_is_seen(prior: float) -> None:
    assert mtbf_hours(Past(hours=50_000.0, unclean_ends=5_000), prior) == pytest.approx(10.0, rel=0.02)
