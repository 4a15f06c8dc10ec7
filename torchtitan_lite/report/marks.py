"""What the page draws of a run besides its curves: its checkpoints, their bandwidth, their shards. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from torchtitan_lite.log import listed
from torchtitan_lite.report.run import Run
from torchtitan_lite.report.saved_steps import Fate, Save, ShardMap
from torchtitan_lite.report.scales import Scale, nice_scale
from torchtitan_lite.report.starts import ReportedStart

T = TypeVar("T")

MAX_BARS = 90
MAX_LANES = 60
MAX_MARKS = 240
"""In one lane, of one fate."""
MAX_ROWS = 32
"""More ranks are cells of a grid."""
MAX_CELLS = 2048


class Lane(NamedTuple):
    """One start in shares of the width: where its steps begin, are new, and end; and its checkpoints."""

    start: ReportedStart
    begin: float
    again: float
    """Up to there an earlier start had trained them."""
    end: float
    saves: list[Save]


def lanes_of(run: Run, x: Scale) -> list[Lane]:
    """Return a lane for each of the last starts, with the checkpoints that it saved."""
    reached, lanes = 0, []
    for start in run.starts[-MAX_LANES:]:
        first, last = start.loaded.step, start.last_step
        again = min(max(reached, first), last)
        lanes.append(Lane(start, x.at(first), x.at(again), x.at(last), _shown_saves(run, start)))
        reached = max(reached, last)
    return lanes


def _shown_saves(run: Run, start: ReportedStart) -> list[Save]:
    shown: list[Save] = []
    for fate in Fate:
        found = [save for save in run.saves if save.start == start.number and save.fate is fate]
        shown += found[:: math.ceil(len(found) / MAX_MARKS) or 1]
    return shown


def fate_counts(saves: Sequence[Save]) -> list[tuple[Fate, int]]:
    """Return how many checkpoints have each fate, without those that none has."""
    counts = Counter(save.fate for save in saves)
    return [(fate, counts[fate]) for fate in Fate if counts[fate]]


class Rates(NamedTuple):
    """The bandwidth of each save, or the means of several next to each other."""

    bars: list[tuple[float, Sequence[Save]]]
    """In units, and the saves of each."""
    y: Scale
    unit: tuple[float, str]
    """Bytes a second, and its name."""
    best: Save


def rates_of(run: Run, best: float) -> Rates | None:
    """Return the bandwidth of each save on an axis up to `best`; None without a save."""
    saves = [save for save in run.committed if save.bytes_per_second]
    if not saves:
        return None
    unit = (1e9, "GB/s") if best >= 1e9 else (1e6, "MB/s")
    bars = [
        (sum((save.bytes_per_second or 0.0) / unit[0] for save in group) / len(group), group)
        for group in _groups(saves, MAX_BARS)
    ]
    highest = next(save for save in saves if save.bytes_per_second == run.best_rate)
    return Rates(bars, nice_scale(0.0, best / unit[0], 3), unit, highest)


def impossible_rates(run: Run) -> str:
    """Return which saves are not in the drawing of the bandwidth, because their figures are impossible; "" for none."""
    steps = [f"{save.step:,}" for save in run.saves if save.is_impossible]
    if not steps:
        return ""
    plural = "" if len(steps) == 1 else "s"
    return f"Left out, because no disk has that bandwidth: step{plural} {listed(steps, most=8)}."


class Cell(NamedTuple):
    """Some ranks next to each other, and the mean of their bytes."""

    ranks: Sequence[int]
    mean: float


def cells_of(shards: ShardMap) -> list[Cell]:
    """Return a cell for each rank, or for as many next to each other as fit; none where each rank has a row."""
    if len(shards.ranks) <= MAX_ROWS:
        return []
    totals = shards.totals
    groups = _groups(list(totals), MAX_CELLS)
    return [Cell(ranks, sum(totals[rank] for rank in ranks) / len(ranks)) for ranks in groups]


def _groups(items: Sequence[T], most: int) -> list[Sequence[T]]:
    """Return `items` in at most `most` groups of items next to each other."""
    size = math.ceil(len(items) / most)
    return [items[begin : begin + size] for begin in range(0, len(items), size)]
