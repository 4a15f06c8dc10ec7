"""The curves over the steps: the loss, and the time of a step with what saves took of it. Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torchtitan_lite.log import counted
from torchtitan_lite.report.run import Run, steps_per_line
from torchtitan_lite.report.scales import Scale, area_path, exact_scale, line_path, nice_scale, seconds_text
from torchtitan_lite.report.starts import ReportedStart

LOSS_HEIGHT, TIME_HEIGHT = 260, 200
CURVE_WIDTH = 1000
"""Units of the paths of a curve."""
BADGE_ROWS = 3
_BADGE_SHARE = 0.055
"""Of the width that a badge needs on a narrow screen."""
MAX_POINTS = 900
MAX_SPANS = 420
MAX_HITS = 180
MAX_BADGES = 40
_MOST_NOT_FINITE = 200


def step_scale(runs: Sequence[Run]) -> Scale:
    """Return the axis of steps that has all that `runs` reached."""
    first = min((run.logged.steps[0] for run in runs if len(run.logged)), default=0)
    last = max([1, *(run.last_step for run in runs), *(save.step for run in runs for save in run.saves)])
    return exact_scale(0 if first < 0.1 * last else first, last, 8)


class Badge(NamedTuple):
    """The mark of a start that resumed, at a share of the width; its badge is in a row above the drawing, from 0 up."""

    share: float
    row: int
    kind: str
    start: ReportedStart


class Curve(NamedTuple):
    """The losses of one run: paths of their means and of the range around these, if there are any."""

    points: list[Bucket]
    line: str
    band: str
    lost: list[int]
    """Steps whose loss is not finite."""


@dataclass(frozen=True)
class LossFigure:
    """The losses of all runs."""

    x: Scale
    y: Scale
    curves: list[Curve]
    badges: list[Badge]
    hits: list[tuple[float, float, str]]
    """Parts of the width, and the text that the page shows over each."""
    is_merged: bool
    """Whether a point may stand for several steps."""
    note: str


def loss_figure(runs: Sequence[Run]) -> LossFigure | None:
    """Return the losses of all `runs` in one drawing; None if no run has any."""
    points_of = [buckets(run.logged.steps, run.logged.loss, MAX_POINTS) for run in runs]
    if not any(points_of):
        return None
    x = step_scale(runs)
    ranges = [usual_range(points) for points in points_of if points]
    y = nice_scale(min(low for low, _ in ranges), max(high for _, high in ranges))
    num_lost = sum(not math.isfinite(loss) for run in runs for loss in run.logged.loss)
    lost = f"{counted(num_lost, 'logged step')} {'has' if num_lost == 1 else 'have'} a loss that is not finite"
    note = f"{lost} (a cross at the bottom)." if num_lost else ""
    return LossFigure(
        x,
        y,
        [_curve(run, points, x, y) for run, points in zip(runs, points_of, strict=True)],
        _badges(runs, x),
        list(_loss_hits(runs, x)),
        any(len(run.logged) > len(points) for run, points in zip(runs, points_of, strict=True)),
        note,
    )


def _curve(run: Run, points: list[Bucket], x: Scale, y: Scale) -> Curve:
    def path(values: Iterable[float]) -> list[tuple[float, float]]:
        pairs = zip(points, values, strict=True)
        return [_point_at(point.middle, value, x, y, LOSS_HEIGHT) for point, value in pairs]

    line = line_path(path(point.mean for point in points))
    band = area_path(path(point.high for point in points), path(point.low for point in points))
    lost = [step for step, loss in zip(run.logged.steps, run.logged.loss, strict=True) if not math.isfinite(loss)]
    return Curve(points, line, band if any(point.count > 1 for point in points) else "", lost[:_MOST_NOT_FINITE])


def _point_at(step: float, level: float, x: Scale, y: Scale, height: int) -> tuple[float, float]:
    return CURVE_WIDTH * x.at(step), height * (1 - y.at(level))


def _badges(runs: Sequence[Run], x: Scale) -> list[Badge]:
    """Return the badges of the resumes in order, each in the lowest row where it covers no other."""
    marks: list[tuple[float, str, ReportedStart]] = []
    for index, run in enumerate(runs):
        resumed = [start for start in run.starts if start.loaded.is_resumed and x.low <= start.loaded.step <= x.high]
        every = math.ceil(len(resumed) / MAX_BADGES) or 1
        marks += [(x.at(start.loaded.step), f"run{index}", start) for start in resumed[::every]]
    ends, badges = [-1.0] * BADGE_ROWS, []
    for share, kind, start in sorted(marks, key=lambda mark: mark[0]):
        row = next((index for index, end in enumerate(ends) if share - end >= _BADGE_SHARE), 0)
        ends[row] = share
        badges.append(Badge(share, row, kind, start))
    return badges


def _loss_hits(runs: Sequence[Run], x: Scale) -> Iterator[tuple[float, float, str]]:
    """Yield what the page shows over each part of the curve: with two runs, the values of both."""
    for index, run in enumerate(runs):
        if index and len(runs[0].logged):
            return
        points = buckets(run.logged.steps, run.logged.loss, MAX_HITS)
        others = [buckets(other.logged.steps, other.logged.loss, MAX_HITS) for other in runs[index + 1 :]]
        for (begin, end), point in zip(_columns([point.middle for point in points], x), points, strict=True):
            label = f"{point.steps}: loss {point.values}" + (f" ({run.name})" if others else "")
            for other, found in zip(runs[index + 1 :], others, strict=True):
                near = [each for each in found if each.first <= point.last and each.last >= point.first]
                label += f"\n{near[0].steps}: loss {near[0].values} ({other.name})" if near else ""
            yield begin, end, label


def _columns(middles: Sequence[float], x: Scale) -> Iterator[tuple[float, float]]:
    """Yield the share of the width that is nearest to each of `middles`."""
    borders = [x.low, *((left + right) / 2 for left, right in pairwise(middles)), x.high]
    yield from ((x.at(left), x.at(right)) for left, right in pairwise(borders[: len(middles) + 1]))


@dataclass(frozen=True)
class Span:
    """The mean time of the steps after `first` up to `last`, and what saves took of it."""

    first: int
    last: int
    seconds: float
    stall_seconds: float
    highest: float

    @property
    def label(self) -> str:
        """What the page says of it."""
        single = self.last - self.first == 1
        label = f"step {self.last:,}" if single else f"steps {self.first + 1:,} to {self.last:,}"
        label += f": {seconds_text(self.seconds)}" + ("" if single else " a step")
        if self.highest > self.seconds * 1.001:
            label += f", up to {seconds_text(self.highest)}"
        return label + (f"\nblocked by saves: {seconds_text(self.stall_seconds)} of it" if self.stall_seconds else "")


def spans_of(run: Run, limit: int = MAX_SPANS) -> list[Span]:
    """Return the time of a step over the run, in at most `limit` spans; a stall is in the line that is logged next."""
    logged, counts = run.logged, steps_per_line(run.logged.steps, [start.loaded.step for start in run.starts])
    stalls = stalls_by_line(logged.steps, _stalls(run))
    size = max(1, math.ceil(len(logged) / limit))
    found = []
    for begin in range(0, len(logged), size):
        lines = [line for line in range(begin, min(begin + size, len(logged))) if math.isfinite(logged.seconds[line])]
        num = sum(counts[line] for line in lines)
        if not num:
            continue
        seconds = sum(logged.seconds[line] * counts[line] for line in lines) / num
        first = logged.steps[lines[0]] - counts[lines[0]]
        stall = min(seconds, sum(stalls.get(line, 0.0) for line in lines) / num)
        highest = max(logged.seconds[line] for line in lines)
        found.append(Span(first, logged.steps[lines[-1]], seconds, stall, highest))
    return found


def stalls_by_line(steps: Sequence[int], saves: Sequence[tuple[int, float, int | None]]) -> dict[int, float]:
    """Return the seconds that saves blocked, by the logged line that they are in: the first one after their step.

    Each save is its step, the seconds, and the last step whose line is of the same start; None without a later start.
    A start that resumed has replaced the lines after that, and with them the stall.
    """
    stalls: dict[int, float] = {}
    for step, seconds, last in saves:
        line = bisect.bisect_right(steps, step)
        if line < len(steps) and (last is None or steps[line] <= last):
            stalls[line] = stalls.get(line, 0.0) + seconds
    return stalls


def _stalls(run: Run) -> list[tuple[int, float, int | None]]:
    """Return the saves of `run` as `stalls_by_line` takes them."""
    lasts: dict[int, int | None] = {}
    last: int | None = None
    for start in reversed(run.starts):
        lasts[start.number] = last
        last = start.loaded.step if last is None else min(last, start.loaded.step)
    return [(save.step, save.stall_seconds, lasts[save.start]) for save in run.saves if save.stall_seconds]


def time_ceiling(spans: Sequence[Span]) -> float:
    """Return the highest time of a step that is drawn: a rare step that is far longer is cut, and marked."""
    ordered = sorted(span.seconds for span in spans)
    high, usual = ordered[-1], ordered[min(len(ordered) - 1, int(0.97 * len(ordered)))]
    return 1.5 * usual if high > 2.5 * usual else high


@dataclass(frozen=True)
class StepTimeFigure:
    """The time of each step, and what saves took of it."""

    x: Scale
    y: Scale
    spans: list[Span]
    line: str
    ground: str
    """The area below the line."""
    per_point: int
    """The most logged lines that one point is the mean of."""


def step_time_figure(run: Run, spans: list[Span], x: Scale, ceiling: float) -> StepTimeFigure | None:
    """Return the time of each step, the `spans` of `run`, up to `ceiling` seconds; None if it is not logged."""
    if not spans:
        return None
    y = nice_scale(0.0, ceiling, 4)
    corners = [_point_at(step, span.seconds, x, y, TIME_HEIGHT) for span in spans for step in (span.first, span.last)]
    ground = [(corners[0][0], float(TIME_HEIGHT)), (corners[-1][0], float(TIME_HEIGHT))]
    per_point = math.ceil(len(run.logged) / MAX_SPANS)
    return StepTimeFigure(x, y, spans, line_path(corners), area_path(corners, ground), per_point)


# Fewer points that show the same curve: each bucket keeps its lowest, its highest and its mean value.
#
# A spike of one step among a million stays visible, because the extremes of every bucket are drawn. Pure.


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

    @property
    def steps(self) -> str:
        """Its steps, in words."""
        return f"step {self.first:,.0f}" + (f" to {self.last:,.0f}" if self.last > self.first else "")

    @property
    def values(self) -> str:
        """Its values, in words."""
        written = f"{self.mean:.4f}"
        return written if self.count == 1 else f"{written} on average, {self.low:.4f} to {self.high:.4f}"


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
