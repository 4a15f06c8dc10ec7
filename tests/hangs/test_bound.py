"""How long a step may take before its rank counts as hung."""

from __future__ import annotations

import math

import pytest

from torchtitan_lite.hangs.own_rank import Bound, Stillness


def after(setting: object, *seconds: float) -> float:
    """Return the bound after steps that took `seconds`."""
    bound = Bound(setting)  # type: ignore[arg-type]  # what a test gives
    for each in seconds:
        bound.step_took(each)
    return bound.seconds


def test_a_number_of_seconds_counts_once_the_first_step_is_over() -> None:
    assert (after(30), after(30, 100.0), after(30, 100.0, 5.0)) == (0.0, 30.0, 30.0)


def test_auto_watches_nothing_before_ten_steps_are_over() -> None:
    assert (after("auto", *[1.0] * 9), after("auto", *[1.0] * 10)) == (0.0, 60.0)


def test_auto_is_ten_times_the_slowest_step_and_at_least_a_minute() -> None:
    assert after("auto", *[1.0] * 10, 8.0, 1.0) == 80.0
    assert after("auto", *[0.01] * 20) == 60.0


def test_auto_forgets_a_slow_step_after_a_hundred_others() -> None:
    assert after("auto", *[1.0] * 10, 50.0, *[7.0] * 99) == 500.0
    assert after("auto", *[1.0] * 10, 50.0, *[7.0] * 100) == 70.0


def test_the_first_step_which_compiles_says_nothing_about_the_others() -> None:
    assert after("auto", 900.0, *[1.0] * 9) == 60.0


@pytest.mark.parametrize("usual_seconds", [0.1, 1.0, 6.0, 20.0, 300.0])
def test_a_step_of_five_times_the_usual_is_no_hang(usual_seconds: float) -> None:
    assert after("auto", *[usual_seconds] * 10) > 5 * usual_seconds


def looked(*looks: tuple[float, int], is_paused: bool = False) -> float:
    """Return the seconds of the last of `looks`, each a time and a count, which were to come every second."""
    stillness, seconds = Stillness(), 0.0
    for now, count in looks:
        seconds = stillness.look(now, count, is_paused=is_paused, tick_seconds=1.0)
    return seconds


def test_a_count_that_stands_is_still_from_the_look_that_found_it_on() -> None:
    assert looked((10, 1), (11, 1), (12, 1)) == 2.0


def test_a_count_that_changes_begins_again() -> None:
    assert looked((10, 1), (11, 1), (12, 2)) == 0.0
    assert looked((10, 1), (11, 1), (12, 2), (13, 2)) == 1.0


def test_a_pause_is_not_still() -> None:
    assert looked((10, 1), (11, 1), (12, 1), is_paused=True) == 0.0


def test_the_time_since_a_pause_counts_through_steps() -> None:
    stillness = Stillness()
    assert stillness.since_pause == math.inf
    for now, count, is_paused in ((10, 1, True), (11, 2, False), (12, 3, False)):
        stillness.look(now, count, is_paused=is_paused, tick_seconds=1.0)
    assert stillness.since_pause == 2.0


def test_time_in_which_the_watcher_itself_did_not_run_counts_as_two_looks() -> None:
    """The job was suspended, or the machine."""
    assert looked((10, 1), (11, 1), (1000, 1), (1001, 1)) == 4.0
