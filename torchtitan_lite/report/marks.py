"""The bars and marks of a run: where the time went, its checkpoints, their bandwidth, their shards. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from torchtitan_lite.log import readable_bytes
from torchtitan_lite.report import svg
from torchtitan_lite.report.run import LABELS, Run
from torchtitan_lite.report.saved_steps import Fate, Save, ShardMap
from torchtitan_lite.report.scales import Scale, nice_scale, rate_text, seconds_text, share_text, short_step
from torchtitan_lite.report.starts import ReportedStart
from torchtitan_lite.report.svg import Figure

BAR_HEIGHT = 40
RATE_HEIGHT = 150
MAX_BARS = 90
MAX_LANES = 60
MAX_MARKS = 240
"""In one lane, of one fate."""
MAX_ROWS = 32
GRID_COLUMNS, MAX_CELLS, CELL_HEIGHT = 32, 2048, 15
_LABELLED_SHARE = 0.09
_NAMED_STEPS = 8

_CROSS, _TRIANGLE = "M-5 -5l10 10m0 -10l-10 10", "M0 -7L6.5 5H-6.5Z"
SHAPES = {
    Fate.KEPT: svg.element("circle", r=5.5),
    Fate.PURGED: svg.element("circle", r=4),
    Fate.QUARANTINED: svg.element("path", d=_TRIANGLE),
    Fate.ABANDONED: svg.element("path", d="M0 -6.5L6.5 0L0 6.5L-6.5 0Z"),
    Fate.SET_ASIDE: svg.element("path", d="M-4.5 -4.5h9v9h-9Z"),
    Fate.DAMAGED: svg.element("path", d=_TRIANGLE),
    Fate.FAILED: svg.element("path", d=_CROSS),
    Fate.CUT: svg.element("path", d=_CROSS),
    Fate.UNDER_WAY: svg.element("circle", r=5),
    Fate.UNSEEN: svg.element("path", d="M-5 0h10M0 -5v10"),
    Fate.GONE: svg.element("path", d="M-5 0h10"),
}
"""No two that look alike in print: the fill differs too."""


def fate_class(fate: Fate) -> str:
    return fate.name.lower().replace("_", "-")


def fate_sample(fate: Fate) -> str:
    """Return the mark of `fate`, for a legend or a line of text."""
    mark = svg.element("svg", SHAPES[fate], x=8, y=8, overflow="visible", class_=f"fate {fate_class(fate)}")
    return svg.element("svg", mark, width=16, height=16, class_="sample", aria_hidden="true")


def time_figure(parts: Mapping[str, float]) -> Figure | None:
    """Return the bar of the parts of the run's time; None if nothing is known of it."""
    if not parts:
        return None
    drawn, begin, total = [], 0.0, sum(parts.values())
    for part, seconds in parts.items():
        share = seconds / total
        label = f"{LABELS[part]}: {seconds_text(seconds)}, {share_text(share)}"
        drawn.append(svg.rect(begin, share, 0, BAR_HEIGHT, f"part {part}", label))
        if share >= _LABELLED_SHARE:
            words = {"x": svg.percent(begin + share / 2), "y": BAR_HEIGHT / 2 + 5, "text_anchor": "middle"}
            drawn.append(svg.text(share_text(share), class_=f"on-part {part}", **words))
        begin += share
    return Figure(svg.drawing(BAR_HEIGHT, "Where the time went", drawn), top=0, kind="bare")


def timeline_figure(run: Run, x: Scale) -> Figure | None:
    """Return a lane for each start, with the checkpoints that it saved; None without any start."""
    starts = run.starts[-MAX_LANES:]
    if not starts:
        return None
    lane = 34 if len(starts) <= 10 else 20 if len(starts) <= 30 else 12
    height = lane * len(starts) + 4
    reached = 0
    drawn = list(svg.frame(height, x, None))
    for row, start in enumerate(starts):
        y = lane * row + lane / 2
        drawn += _lane(start, x, y, lane, reached, is_running=start is run.starts[-1] and run.status == "running")
        drawn += _saves_of_lane([save for save in run.saves if save.start == start.number], x, y)
        label = f"start {start.number}" if lane > 12 or row % 2 == 0 else ""
        drawn.append(svg.text(label, x=-8, y=y + 4, class_="tick", text_anchor="end"))
        reached = max(reached, start.last_step)
    note = ""
    if len(run.starts) > len(starts):
        note = f"The last {MAX_LANES} of {len(run.starts):,} starts."
    has_again = any("again" in part for part in drawn)
    legend = (("again", "steps that an earlier start had trained already"),) if has_again else ()
    return Figure(svg.drawing(height, "Checkpoints by start and step", drawn), legend, note)


def _lane(start: ReportedStart, x: Scale, y: float, height: int, reached: int, *, is_running: bool) -> Iterator[str]:
    """Yield the steps of one start, those that an earlier one had reached already lighter, and its end."""
    begin, end = x.at(start.loaded.step), x.at(start.last_step)
    again = x.at(min(max(reached, start.loaded.step), start.last_step))
    if again > begin:
        yield svg.element("line", x1=svg.percent(begin), x2=svg.percent(again), y1=y, y2=y, class_="lane again")
    yield svg.element("line", x1=svg.percent(again), x2=svg.percent(end), y1=y, y2=y, class_="lane")
    for event in start.diverged:
        label = svg.title(f"Step {event.step:,}: {event.reason}")
        yield svg.at(x.at(event.step), y, svg.element("path", label, d="M0 -8v16"), class_="end diverged")
    if start.end in ("killed", "failed"):
        bar = svg.element("path", svg.title(f"Start {start.number}: {start.end}"), d="M0 -8v16", class_="end")
        word = svg.text(start.end, x=7, y=-5 if height > 30 else 4, class_="end") if height > 12 else ""
        yield svg.at(end, y, bar + word, class_=start.end)
    elif is_running:
        yield svg.at(end, y, svg.element("path", svg.title("running"), d="M0 -5L9 0L0 5Z"), class_="runs")


def _saves_of_lane(saves: Sequence[Save], x: Scale, y: float) -> Iterator[str]:
    for fate in Fate:
        found = [save for save in saves if save.fate is fate]
        shown = found[:: math.ceil(len(found) / MAX_MARKS) or 1]
        for save in shown:
            label = f"Step {save.step:,}: {fate.value}"
            label += f", {readable_bytes(save.nbytes)}" if save.nbytes else ""
            label += f" in {seconds_text(save.seconds)}" if save.seconds is not None else ""
            label += f"\n{save.note}" if save.note else ""
            mark = svg.element("g", svg.title(label), SHAPES[fate])
            yield svg.at(x.at(save.step), y, mark, class_=f"fate {fate_class(fate)}")


def fate_counts(saves: Sequence[Save]) -> list[tuple[Fate, int]]:
    """Return how many checkpoints have each fate, without those that none has."""
    counts = Counter(save.fate for save in saves)
    return [(fate, counts[fate]) for fate in Fate if counts[fate]]


def rate_figure(run: Run, best: float) -> Figure | None:
    """Return the bandwidth of each save on an axis up to `best`; None without a save."""
    saves = [save for save in run.committed if save.bytes_per_second]
    if not saves:
        return None
    unit, name = (1e9, "GB/s") if best >= 1e9 else (1e6, "MB/s")
    y = nice_scale(0.0, best / unit, 3)
    size = math.ceil(len(saves) / MAX_BARS)
    groups = [saves[begin : begin + size] for begin in range(0, len(saves), size)]
    drawn = list(svg.frame(RATE_HEIGHT, Scale(0, 1), y))
    slot = 1 / max(len(groups), 8)
    for index, group in enumerate(groups):
        rates = [(save.bytes_per_second or 0.0) / unit for save in group]
        top = RATE_HEIGHT * (1 - y.at(sum(rates) / len(rates)))
        label = "\n".join(map(_rate_label, group[:8])) + ("\n..." if len(group) > 8 else "")
        drawn.append(svg.rect(slot * (index + 0.14), slot * 0.72, top, RATE_HEIGHT - top, "rate", label))
        if index % math.ceil(len(groups) / 8) == 0:
            words = {"x": svg.percent(slot * (index + 0.5)), "y": RATE_HEIGHT + 18, "text_anchor": "middle"}
            drawn.append(svg.text(short_step(group[0].step), class_="tick" if index % 2 == 0 else "tick wide", **words))
    level = RATE_HEIGHT * (1 - y.at(run.best_rate / unit))
    drawn.append(svg.element("line", x1="0", x2="100%", y1=level, y2=level, class_="best"))
    where = next(save.step for save in saves if save.bytes_per_second == run.best_rate)
    drawn.append(
        svg.text(
            f"best: {rate_text(run.best_rate)}, step {where:,}", x="100%", y=level - 6, class_="best", text_anchor="end"
        )
    )
    note = f"{name}; a save's bytes by the seconds until it was committed."
    note += f" Each bar is the mean of up to {size} saves." if size > 1 else ""
    return Figure(svg.drawing(RATE_HEIGHT, "Bandwidth of each save", drawn), note=note, top=20)


def impossible_rates(run: Run) -> str:
    """Return which saves are not in the drawing of the bandwidth, because their figures are impossible; "" for none."""
    steps = [f"{save.step:,}" for save in run.saves if save.is_impossible]
    if not steps:
        return ""
    more = f" and {len(steps) - _NAMED_STEPS:,} more" if len(steps) > _NAMED_STEPS else ""
    named = f"step{'' if len(steps) == 1 else 's'} {', '.join(steps[:_NAMED_STEPS])}{more}"
    return f"Left out, because no disk has that bandwidth: {named}."


def _rate_label(save: Save) -> str:
    return (
        f"Step {save.step:,}: {rate_text(save.bytes_per_second or 0.0)}, {readable_bytes(save.nbytes or 0)} in "
        f"{seconds_text(save.seconds or 0.0)}, blocked {seconds_text(save.stall_seconds or 0.0)}"
    )


def shard_figure(shards: ShardMap) -> Figure:
    """Return a bar for each rank, or a grid of cells for more ranks than fit."""
    return _shard_rows(shards) if len(shards.ranks) <= MAX_ROWS else _shard_grid(shards)


def _shard_rows(shards: ShardMap) -> Figure:
    largest, lane = max(shards.totals.values()) or 1, 26 if len(shards.ranks) <= 12 else 16
    drawn = []
    for row, (rank, parts) in enumerate(shards.ranks.items()):
        y, begin = lane * row, 0.0
        for index, part in enumerate(shards.parts):
            share = 0.82 * parts.get(part, 0) / largest
            label = svg.title(f"rank {rank}, {part}: {parts.get(part, 0):,} bytes")
            place = {"x": svg.percent(begin), "width": svg.percent(share), "y": y + 2, "height": lane - 6}
            drawn.append(svg.element("rect", label, class_=f"shard shard{index}", **place))
            begin += share
        drawn.append(svg.text(f"rank {rank}", x=-8, y=y + lane / 2 + 3, class_="tick", text_anchor="end"))
        total = svg.text(readable_bytes(shards.totals[rank]), y=4, class_="tick")
        drawn.append(svg.at(begin, y + lane / 2 - 1, svg.element("g", total, transform="translate(8 0)")))
    height = lane * len(shards.ranks)
    legend = tuple((f"shard shard{index}", part) for index, part in enumerate(shards.parts))
    return Figure(svg.drawing(height, "Bytes by rank", drawn), legend, top=0, kind="rows")


def _shard_grid(shards: ShardMap) -> Figure:
    """Draw a cell for each rank, or for as many next to each other as fit: the more bytes, the darker."""
    totals = list(shards.totals.items())
    size = math.ceil(len(totals) / MAX_CELLS)
    groups = [totals[begin : begin + size] for begin in range(0, len(totals), size)]
    means = [sum(nbytes for _, nbytes in group) / len(group) for group in groups]
    low, high = min(means), max(means)
    drawn = []
    for index, (group, mean) in enumerate(zip(groups, means, strict=True)):
        row, column = divmod(index, GRID_COLUMNS)
        ranks = f"rank {group[0][0]}" + (f" to {group[-1][0]}" if len(group) > 1 else "")
        share = (mean - low) / (high - low) if high > low else 0.5
        place = {"x": svg.percent((column + 0.04) / GRID_COLUMNS), "width": svg.percent(0.92 / GRID_COLUMNS)}
        place |= {
            "y": str(CELL_HEIGHT * row),
            "height": str(CELL_HEIGHT - 2),
            "fill_opacity": f"{0.18 + 0.82 * share:.2f}",
        }
        drawn.append(svg.element("rect", svg.title(f"{ranks}: {readable_bytes(int(mean))}"), class_="cell", **place))
        if column == 0 and row % 4 == 0:
            drawn.append(svg.text(str(group[0][0]), x=-8, y=CELL_HEIGHT * row + 11, class_="tick", text_anchor="end"))
    height = CELL_HEIGHT * math.ceil(len(groups) / GRID_COLUMNS)
    spread = f"from {readable_bytes(int(low))} (light) to {readable_bytes(int(high))} (dark)"
    note = f"One cell for {size} ranks, their mean {spread}." if size > 1 else f"One cell a rank, {spread}."
    return Figure(svg.drawing(height, "Bytes by rank", drawn), note=note, top=0)
