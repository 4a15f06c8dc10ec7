"""How the ranks leave: the decision as a table."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_lite.checkpoint.schedule.leaving import Leaving, how_to_leave

AT_ONCE, AWAITED, SAVE = Leaving.AT_ONCE, Leaving.WITH_THE_SAVE_AWAITED, Leaving.AFTER_A_SAVE


@pytest.mark.parametrize(
    ("durable", "awaited", "seconds_left", "save_seconds", "expected"),
    [
        pytest.param(10, None, 100.0, 5.0, AT_ONCE, id="this step is durable"),
        pytest.param(10, None, 0.0, 5.0, AT_ONCE, id="this step is durable, and the time is over"),
        pytest.param(10, 10, 100.0, 5.0, AT_ONCE, id="the save in flight was of this step"),
        pytest.param(8, 8, 100.0, 5.0, SAVE, id="time enough for another"),
        pytest.param(8, 8, 5.0, 5.0, SAVE, id="time just enough for another"),
        pytest.param(8, 8, 4.9, 5.0, AWAITED, id="too little for another"),
        pytest.param(8, 8, 0.0, 5.0, AWAITED, id="none for another"),
        pytest.param(4, 8, 0.0, 5.0, SAVE, id="the save in flight failed"),
        pytest.param(None, 8, 0.0, None, SAVE, id="the save in flight was the first, and failed"),
        pytest.param(8, None, 0.0, 5.0, SAVE, id="nothing was in flight, too little time"),
        pytest.param(8, None, 100.0, 5.0, SAVE, id="nothing was in flight, time enough"),
        pytest.param(None, None, 100.0, None, SAVE, id="never saved yet"),
        pytest.param(None, None, 0.0, None, SAVE, id="never saved yet, and no time"),
        pytest.param(8, 8, math.inf, 5.0, SAVE, id="no deadline"),
    ],
)
def test_at_the_end_of_step_10(
    durable: int | None, awaited: int | None, seconds_left: float, save_seconds: float | None, expected: Leaving
) -> None:
    found = how_to_leave(10, durable=durable, awaited=awaited, seconds_left=seconds_left, save_seconds=save_seconds)
    assert found is expected


STEPS = st.integers(1, 4)
SECONDS = st.floats(0, 10)


@given(STEPS, st.none() | STEPS, st.none() | STEPS, SECONDS, st.none() | SECONDS)
def test_a_step_is_lost_only_without_time_and_with_a_durable_save(
    step: int, durable: int | None, awaited: int | None, seconds_left: float, save_seconds: float | None
) -> None:
    leaving = how_to_leave(step, durable=durable, awaited=awaited, seconds_left=seconds_left, save_seconds=save_seconds)
    if leaving is Leaving.AT_ONCE:
        assert durable == step
    if leaving is Leaving.WITH_THE_SAVE_AWAITED:
        assert durable is not None and durable == awaited
        assert save_seconds is not None and seconds_left < save_seconds
