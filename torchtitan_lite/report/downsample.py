"""Fewer points that show the same curve: each bucket keeps its lowest, its highest and its mean value.

A spike of one step among a million stays visible, because the extremes of every bucket are drawn. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bucket:
    """The finite values of the points from `first` to `last`, both included."""

    first: float
    last: float
    low: float
    high: float
    mean: float
    count: int

    @property
    def middle(self) -> float:
        """The x at which the bucket is drawn."""
        return (self.first + self.last) / 2


def buckets(xs: Sequence[float], ys: Sequence[float], limit: int) -> list[Bucket]:
    """Return at most `limit` buckets of the points, which ascend in x; a bucket without a finite value is left out.

    Up to `limit` points are a bucket each. More are divided by their x, so a gap between points stays a gap.
    """
    if len(xs) <= limit:
        return [Bucket(x, x, y, y, y, 1) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    begin, width = xs[0], (xs[-1] - xs[0]) / limit or 1.0
    found, current, total = [], -1, 0.0
    first = last = low = high = 0.0
    count = 0
    for x, y in zip(xs, ys, strict=True):
        if not math.isfinite(y):
            continue
        index = min(limit - 1, int((x - begin) / width))
        if index != current:
            if count:
                found.append(Bucket(first, last, low, high, total / count, count))
            current, first, low, high, total, count = index, x, y, y, 0.0, 0
        last, total, count = x, total + y, count + 1
        low, high = min(low, y), max(high, y)
    return [*found, Bucket(first, last, low, high, total / count, count)] if count else found


def usual_range(points: Sequence[Bucket]) -> tuple[float, float]:
    """Return the range of the values without lone spikes: a value counts as high as two of its four neighbours reach.

    If spikes do not double it, it is the range of all values.
    """
    lows, highs = _medians([point.low for point in points]), _medians([point.high for point in points])
    low, high = min(lows), max(highs)
    lowest, highest = min(point.low for point in points), max(point.high for point in points)
    margin = high - low
    return (lowest if low - lowest <= margin else low - margin / 8), (
        highest if highest - high <= margin else high + margin / 8
    )


def _medians(values: Sequence[float]) -> list[float]:
    windows = (values[max(0, index - 2) : index + 3] for index in range(len(values)))
    return [sorted(window)[len(window) // 2] for window in windows]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the finite `values` are; NaN if there is none."""
    ordered = sorted(value for value in values if math.isfinite(value))
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan
