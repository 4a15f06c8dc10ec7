"""Downsampling keeps what a reader looks for, and axes have round numbers that hold all points."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_lite.report.curves import buckets, usual_range
from torchtitan_lite.report.scales import exact_scale, nice_scale, seconds_text, short_step

VALUES = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), min_size=1, max_size=80)
FEW = settings(max_examples=60, deadline=None)


@FEW
@given(ys=VALUES, limit=st.integers(1, 40))
def test_every_extreme_and_every_finite_point_is_in_a_bucket(ys: list[float], limit: int) -> None:
    found = buckets(range(len(ys)), ys, limit)
    finite = [y for y in ys if math.isfinite(y)]
    assert len(found) <= limit
    assert sum(bucket.count for bucket in found) == len(finite)
    if finite:
        assert min(bucket.low for bucket in found) == min(finite)
        assert max(bucket.high for bucket in found) == max(finite)
        assert math.isclose(
            sum(bucket.mean * bucket.count for bucket in found), sum(finite), rel_tol=1e-9, abs_tol=1e-6 * len(finite)
        )
    assert all(bucket.low <= bucket.mean + 1e-6 and bucket.mean <= bucket.high + 1e-6 for bucket in found)


def test_few_points_stay_as_they_are() -> None:
    found = buckets([1, 5, 9], [2.5, math.nan, 4.5], 10)
    assert [(bucket.middle, bucket.mean) for bucket in found] == [(1, 2.5), (9, 4.5)]


@FEW
@given(low=st.floats(-1e6, 1e6), size=st.floats(0, 1e6))
def test_an_axis_holds_its_values_between_round_ticks(low: float, size: float) -> None:
    scale = nice_scale(low, low + size)
    rounding = 1e-6 * max(1, abs(low), size)
    assert scale.low <= low + rounding
    assert scale.high >= low + size - rounding
    assert 2 <= len(scale.ticks) <= 9
    assert len({scale.text(tick) for tick in scale.ticks}) == len(scale.ticks)


def test_an_axis_of_steps_ends_where_the_run_ends() -> None:
    scale = exact_scale(0, 240)
    assert (scale.low, scale.high, scale.ticks[:3]) == (0, 240, (0, 50, 100))
    assert [short_step(tick) for tick in (500, 2_500, 20_000, 1_500_000)] == ["500", "2,500", "20k", "1.5M"]


def test_durations_have_the_units_of_a_person() -> None:
    texts = [seconds_text(seconds) for seconds in (0.0521, 5.678, 45.61, 200, 3 * 3600 + 300, 200_000)]
    assert texts == ["0.052 s", "5.68 s", "45.6 s", "3 min 20 s", "3 h 5 min", "2 d 7 h"]


def test_a_lone_spike_does_not_flatten_the_curve_and_a_steep_beginning_is_drawn_in_full() -> None:
    steep = [11.0, 9.5, 8.4, 7.6, 7.0, 6.5, 6.1, 5.8, 5.6, 5.5, *[5.4] * 40]
    assert usual_range(buckets(range(50), steep, 100)) == (5.4, 11.0)
    spiked = [*steep[:30], 500.0, *steep[30:]]
    low, high = usual_range(buckets(range(51), spiked, 100))
    assert low == 5.4
    assert 8.4 < high < 11
