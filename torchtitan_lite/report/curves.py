"""The curves over the steps: the loss, and the time of a step with what saves took of it. Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torchtitan_lite.log import counted
from torchtitan_lite.report import svg
from torchtitan_lite.report.run import Run
from torchtitan_lite.report.scales import Scale, exact_scale, nice_scale, seconds_text
from torchtitan_lite.report.svg import Figure

LOSS_HEIGHT, TIME_HEIGHT = 260, 200
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


def loss_figure(runs: Sequence[Run]) -> Figure | None:
    """Return the losses of all `runs` in one drawing; None if no run has any."""
    curves = [buckets(run.logged.steps, run.logged.loss, MAX_POINTS) for run in runs]
    if not any(curves):
        return None
    x = step_scale(runs)
    ranges = [usual_range(points) for points in curves if points]
    y = nice_scale(min(low for low, _ in ranges), max(high for _, high in ranges))
    resumes = [mark for index, run in enumerate(runs) for mark in _resumes(run, x, f"run{index}")]
    paths, marks = [], [*svg.badges(LOSS_HEIGHT, resumes)]
    for index, (run, points) in enumerate(zip(runs, curves, strict=True)):
        paths += [*_band(points, x, y, f"run{index}"), _line(points, x, y, f"run{index}")]
        marks += [
            _overflow_mark(x.at(each.middle), f"{_steps_text(each)}: {_values_text(each)}")
            for each in points
            if each.high > y.high
        ]
        marks += _not_finite(run, x)
    parts = [*svg.frame(LOSS_HEIGHT, x, y), svg.curve(LOSS_HEIGHT, *paths), *marks]
    parts += svg.hits(LOSS_HEIGHT, _loss_columns(runs, x))
    legend = [(f"line run{index}", run.name) for index, run in enumerate(runs)] if len(runs) > 1 else []
    if any(run.logged for run, points in zip(runs, curves, strict=True) if len(run.logged) > len(points)):
        legend.append(("band run0", "lowest to highest"))
    if any(point.high > y.high for points in curves for point in points):
        legend.append(("cut", "higher than the drawing"))
    if resumes:
        legend.append(("mark", "resumed here; the number is that of the start"))
    svg_text = svg.drawing(LOSS_HEIGHT, "Loss by step", parts)
    rows = 1 + max(svg.badge_rows(resumes), default=-1)
    return Figure(svg_text, tuple(legend), _note_of_lost(runs), top=8 + 21 * rows)


def _band(points: Sequence[Bucket], x: Scale, y: Scale, kind: str) -> Iterator[str]:
    if any(point.count > 1 for point in points):
        upper = [_point_at(point.middle, point.high, x, y, LOSS_HEIGHT) for point in points]
        lower = [_point_at(point.middle, point.low, x, y, LOSS_HEIGHT) for point in points]
        yield svg.element("path", d=svg.area_path(upper, lower), class_=f"band {kind}")


def _line(points: Sequence[Bucket], x: Scale, y: Scale, kind: str) -> str:
    path = svg.line_path(_point_at(point.middle, point.mean, x, y, LOSS_HEIGHT) for point in points)
    return svg.element("path", d=path, class_=f"line {kind}")


def _overflow_mark(share: float, label: str) -> str:
    """Return the mark of a value that is higher than the drawing."""
    return svg.at(share, 2, svg.element("path", svg.title(label), d="M-5 7L0 -1L5 7Z"), class_="cut")


def _point_at(step: float, level: float, x: Scale, y: Scale, height: int) -> tuple[float, float]:
    return svg.CURVE_WIDTH * x.at(step), height * (1 - y.at(level))


def _resumes(run: Run, x: Scale, kind: str) -> list[svg.AxisBadge]:
    resumed = [start for start in run.starts if start.loaded.is_resumed and x.low <= start.loaded.step <= x.high]
    every = math.ceil(len(resumed) / MAX_BADGES) or 1
    return [
        svg.AxisBadge(
            x.at(start.loaded.step),
            str(start.number),
            f"Start {start.number} resumed from step {start.loaded.step:,}",
            kind,
        )
        for start in resumed[::every]
    ]


def _not_finite(run: Run, x: Scale) -> Iterator[str]:
    steps = [step for step, loss in zip(run.logged.steps, run.logged.loss, strict=True) if not math.isfinite(loss)]
    for step in steps[:_MOST_NOT_FINITE]:
        shape = svg.element("path", svg.title(f"Step {step:,}: the loss is not finite"), d="M-4 -4l8 8m0 -8l-8 8")
        yield svg.at(x.at(step), LOSS_HEIGHT - 6, shape, class_="not-finite")


def _note_of_lost(runs: Sequence[Run]) -> str:
    num = sum(not math.isfinite(loss) for run in runs for loss in run.logged.loss)
    have = "has" if num == 1 else "have"
    return f"{counted(num, 'logged step')} {have} a loss that is not finite (a cross at the bottom)." if num else ""


def _loss_columns(runs: Sequence[Run], x: Scale) -> Iterator[tuple[float, float, str]]:
    """Yield what the page shows over each part of the curve: with two runs, the values of both."""
    for index, run in enumerate(runs):
        if index and len(runs[0].logged):
            return
        points = buckets(run.logged.steps, run.logged.loss, MAX_HITS)
        others = [buckets(other.logged.steps, other.logged.loss, MAX_HITS) for other in runs[index + 1 :]]
        for (begin, end), point in zip(_columns([point.middle for point in points], x), points, strict=True):
            label = f"{_steps_text(point)}: loss {_values_text(point)}" + (f" ({run.name})" if others else "")
            for other, found in zip(runs[index + 1 :], others, strict=True):
                near = [each for each in found if each.first <= point.last and each.last >= point.first]
                label += f"\n{_steps_text(near[0])}: loss {_values_text(near[0])} ({other.name})" if near else ""
            yield begin, end, label


def _columns(middles: Sequence[float], x: Scale) -> Iterator[tuple[float, float]]:
    """Yield the share of the width that is nearest to each of `middles`."""
    borders = [x.low, *((left + right) / 2 for left, right in pairwise(middles)), x.high]
    yield from ((x.at(left), x.at(right)) for left, right in pairwise(borders[: len(middles) + 1]))


def _steps_text(point: Bucket) -> str:
    return f"step {point.first:,.0f}" + (f" to {point.last:,.0f}" if point.last > point.first else "")


def _values_text(point: Bucket) -> str:
    written = f"{point.mean:.4f}"
    return written if point.count == 1 else f"{written} on average, {point.low:.4f} to {point.high:.4f}"


@dataclass(frozen=True)
class Span:
    """The mean time of the steps after `first` up to `last`, and what saves took of it."""

    first: int
    last: int
    seconds: float
    stall_seconds: float
    highest: float


def spans_of(run: Run, limit: int = MAX_SPANS) -> list[Span]:
    """Return the time of a step over the run, in at most `limit` spans; a stall is in the line that is logged next."""
    logged, counts = run.logged, run.steps_per_line
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
    high, usual = max(span.seconds for span in spans), quantile([span.seconds for span in spans], 0.97)
    return 1.5 * usual if high > 2.5 * usual else high


def step_time_figure(run: Run, x: Scale, ceiling: float) -> Figure | None:
    """Return the time of each step up to `ceiling` seconds; None if it is not logged."""
    spans = spans_of(run)
    if not spans:
        return None
    y = nice_scale(0.0, ceiling, 4)
    stalled = [span for span in spans if span.stall_seconds > 0]
    corners = [
        _point_at(step, span.seconds, x, y, TIME_HEIGHT)
        for span in spans
        for step in (float(span.first), float(span.last))
    ]
    ground = [(corners[0][0], float(TIME_HEIGHT)), (corners[-1][0], float(TIME_HEIGHT))]
    area = svg.element("path", d=svg.area_path(corners, ground), class_="ground")
    parts = [*svg.frame(TIME_HEIGHT, x, y)]
    if 3 * len(stalled) <= len(spans):
        parts += [_rect(span, x, 0, TIME_HEIGHT, "stall-band") for span in stalled]
    line = svg.element("path", d=svg.line_path(corners), class_="line thin")
    parts += [svg.curve(TIME_HEIGHT, area, line)]
    for span in stalled:
        top, bottom = y.at(span.seconds), y.at(span.seconds - span.stall_seconds)
        parts.append(_rect(span, x, TIME_HEIGHT * (1 - top), TIME_HEIGHT * (top - bottom), "stall"))
    parts += [
        _overflow_mark(x.at((span.first + span.last) / 2), _span_label(span)) for span in spans if span.seconds > y.high
    ]
    parts += svg.hits(TIME_HEIGHT, ((x.at(span.first), x.at(span.last), _span_label(span)) for span in spans))
    legend = [("line", "one step, seconds"), ("stall", "of it blocked by a save")]
    if any(span.seconds > y.high for span in spans):
        legend.append(("cut", "longer than the drawing is high"))
    note = (
        f"Each point is the mean of up to {math.ceil(len(run.logged) / MAX_SPANS):,} logged lines."
        if (len(run.logged) > MAX_SPANS)
        else ""
    )
    return Figure(svg.drawing(TIME_HEIGHT, "Time of a step", parts), tuple(legend), note)


def _rect(span: Span, x: Scale, top: float, height: float, kind: str) -> str:
    begin, end = x.at(span.first), x.at(span.last)
    return svg.rect(begin, end - begin, float(top), max(1.0, height), kind)


def _span_label(span: Span) -> str:
    single = span.last - span.first == 1
    steps = f"step {span.last:,}" if single else f"steps {span.first + 1:,} to {span.last:,}"
    label = f"{steps}: {seconds_text(span.seconds)}" + ("" if single else " a step")
    if span.highest > span.seconds * 1.001:
        label += f", up to {seconds_text(span.highest)}"
    return label + (f"\nblocked by saves: {seconds_text(span.stall_seconds)} of it" if span.stall_seconds else "")


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
