"""Compare the interval that `interval_type = "auto"` chooses with the best fixed one, on simulated runs that fail.

    python scripts/simulate_intervals.py --quick
    python scripts/simulate_intervals.py --docs docs/intervals.md

A run trains, saves, fails at random times, restarts and continues from its last durable checkpoint. Its overhead is
wall / work - 1. Between two failures every event (the end of the restart, the beginning of each save, the moment it is
durable) has a known time, so what each uptime adds to the work is one expression, for all of them at once. The interval
comes from the functions that a job uses, without caps; the best fixed one is the best of many, on the same failures.
All times are in units of the mean time between failures. Seeds are fixed.

Two more lines have kills more often than the interval, and resumes from memory: how far the disk is behind.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan_lite.checkpoint.schedule.interval import (
    BEGINNING,
    EverySeconds,
    EverySteps,
    SavePolicy,
    Tick,
)
from torchtitan_lite.checkpoint.schedule.optimum import (
    Caps,
    Past,
    SaveCost,
    choose_interval,
    mtbf_hours,
    optimum_seconds,
)

Floats = NDArray[np.float64]

NUM_FAILURES = 100_000
QUICK_FAILURES = 4_000
NUM_INTERVALS = 81
SEED = 18
COSTS = (0.0001, 0.001, 0.005, 0.01, 0.02)
LONG_COSTS = (0.05, 0.1, 0.2, 0.5, 1.0)
RUN_FAILURES = 20
"""Failures of a run that has to estimate how often it fails."""
PRIOR_IS_WRONG_BY = 8.0
MARKS = ("<!-- simulation: from scripts/simulate_intervals.py -->", "<!-- end of simulation -->")
NO_CAPS = Caps()
INTERVAL = 100
"""Steps of a second, in the lines with kills more often than the interval."""
SAVE_STEPS, KILLED_AFTER = 20, 61
"""Until a save is durable; the last step of a start that is killed 0.6 intervals after its first step."""
OFTEN_KILLED = (("seconds", EverySeconds(INTERVAL)), ("steps", EverySteps(INTERVAL)))
NUM_STARTS = 1_000


@dataclass(frozen=True)
class Point:
    """What saves and restarts cost, and how failures are spread, in units of the mean time between failures."""

    cost: float
    restart: float = 0.0
    in_background: bool = False
    """Whether a fifth of the cost blocks training, the rest is in slower steps, and a save takes five times its cost;
    else all of it blocks."""
    shape: float = 1.0
    """Of the Weibull distribution of uptimes: 1 is at random; less is failures in clusters."""

    @property
    def save(self) -> SaveCost:
        if self.in_background:
            return SaveCost(0.2 * self.cost, 0.8 * self.cost, save_seconds=5 * self.cost)
        return SaveCost(self.cost, save_seconds=self.cost)


POINTS = [
    *(Point(cost, restart, kind) for kind in (False, True) for restart in (0.0, 0.05) for cost in COSTS),
    *(Point(cost, shape=0.7) for cost in COSTS),
]


@dataclass(frozen=True)
class Line:
    """The overheads of one point; those of `auto`... are relative to the best fixed interval's."""

    point: Point
    best_interval: float
    best_overhead: float
    auto_interval: float
    auto: float
    mtbf_twice: float
    """With a time between failures that is believed to be twice what it is."""
    mtbf_half: float
    prior_long: float
    """With an estimate that begins `PRIOR_IS_WRONG_BY` times too long, over the first `RUN_FAILURES` failures."""
    prior_short: float


def main() -> int:
    """Run the command. Return 0."""
    args = _arguments().parse_args()
    num_failures = QUICK_FAILURES if args.quick else NUM_FAILURES
    lines, long = measure(POINTS, num_failures), measure_long(num_failures)
    text = f"{table(lines, num_failures)}\n\n{table_of_long(long)}\n\n{table_of_often_killed()}"
    print(text)
    if args.docs:
        write_into(Path(args.docs), text)
    if args.json:
        Path(args.json).write_text(json.dumps(_document(lines, long, num_failures), indent=1) + "\n", encoding="utf-8")
    return 0


def uptimes(point: Point, num_failures: int) -> Floats:
    """Return the times from each failure to the next: mean 1, the same for every call with the same arguments."""
    generator = np.random.default_rng(SEED)
    return generator.weibull(point.shape, num_failures) / math.gamma(1 + 1 / point.shape)


def work_of(interval: float | Floats, point: Point, times: Floats) -> Floats:
    """Return the work that is durable at the end of each uptime, with saves every `interval`."""
    save = point.save
    # Save j begins after j intervals and j - 1 saves, and is durable save_seconds later.
    after_restart = times - point.restart - save.save_seconds + save.blocked_seconds
    num_durable = np.maximum(0.0, np.floor(after_restart / (interval + save.blocked_seconds)))
    # The first interval after a restart has no save during it.
    work: Floats = num_durable * (interval - save.slower_seconds) + np.where(num_durable > 0, save.slower_seconds, 0.0)
    return work


def overhead(interval: float | Floats, point: Point, times: Floats) -> float:
    """Return wall / work - 1 of a run with these uptimes; infinite if no save is ever durable."""
    work = float(work_of(interval, point, times).sum())
    return float(times.sum()) / work - 1 if work else math.inf


def best_fixed(point: Point, times: Floats) -> tuple[float, float]:
    """Return the best of many intervals around Young's, none below the time of a save, and its overhead."""
    young = math.sqrt(2 * point.cost)
    factors = np.geomspace(0.25, 4.0, NUM_INTERVALS)
    intervals = [max(point.save.least_interval, young * float(factor)) for factor in factors]
    return min(((interval, overhead(interval, point, times)) for interval in intervals), key=lambda pair: pair[1])


def auto(point: Point, mtbf: float = 1.0) -> float:
    """Return the interval that a job chooses if it takes `mtbf` for the time between failures."""
    return choose_interval(point.save, mtbf, NO_CAPS).seconds


def estimated_intervals(point: Point, times: Floats, prior: float) -> Floats:
    """Return the interval of each uptime of runs of `RUN_FAILURES`, which estimate the time between failures."""
    runs = times.reshape(-1, RUN_FAILURES)
    hours = np.cumsum(runs, axis=1) - runs
    intervals = [
        auto(point, mtbf_hours(Past(float(before), ends), prior)) for row in hours for ends, before in enumerate(row)
    ]
    return np.array(intervals)


def measure(points: Iterable[Point], num_failures: int) -> list[Line]:
    """Return the line of each point."""
    lines = []
    for point in points:
        times = uptimes(point, num_failures)
        interval, least = best_fixed(point, times)
        few = times[: max(QUICK_FAILURES, num_failures // 10)]
        _, least_of_few = best_fixed(point, few)
        priors = [
            overhead(estimated_intervals(point, few, prior), point, few) / least_of_few - 1
            for prior in (PRIOR_IS_WRONG_BY, 1 / PRIOR_IS_WRONG_BY)
        ]
        believed = [overhead(auto(point, mtbf), point, times) / least - 1 for mtbf in (1.0, 2.0, 0.5)]
        lines.append(Line(point, interval, least, auto(point), *believed, *priors))
    return lines


def measure_long(num_failures: int) -> list[dict[str, float]]:
    """Return how far the two formulas are from the best fixed interval where saves are long."""
    rows = []
    for cost in LONG_COSTS:
        point = Point(cost)
        times = uptimes(point, num_failures)
        _, least = best_fixed(point, times)
        young, daly = (max(cost, seconds) for seconds in (math.sqrt(2 * cost), optimum_seconds(cost, 1.0)))
        found = {name: overhead(each, point, times) / least - 1 for name, each in (("young", young), ("daly", daly))}
        rows.append({"cost": cost, "best_overhead": least, **found})
    return rows


def farthest_behind(policy: SavePolicy, *, counts_what_is_owed: bool) -> float:
    """Return the most intervals that the disk is behind, if each start is killed and resumes from memory.

    A save that is not durable by then is cut. Without `counts_what_is_owed` each start counts its interval from 0.
    """
    loaded = on_disk = BEGINNING
    farthest = 0
    for _ in range(NUM_STARTS):
        last = on_disk if counts_what_is_owed else loaded
        is_due = counts_what_is_owed and policy.is_overdue(loaded, on_disk)
        saving: Tick | None = None
        for step in range(loaded.step + 1, loaded.step + KILLED_AFTER + 1):
            now = Tick(step, float(step))
            if saving is not None and step >= saving.step + SAVE_STEPS:
                saving, on_disk = None, saving
            farthest = max(farthest, step - on_disk.step)
            if is_due or policy.due(now, last):
                saving = last = now
            is_due = False
        loaded = now
    return farthest / INTERVAL


def table_of_often_killed() -> str:
    """Return how far the disk is behind with kills more often than the interval, as a text."""
    shown = [f"{'interval in':<13}{'what is owed counts':>20}{'each start counts from 0':>27}", "-" * 60]
    for name, policy in OFTEN_KILLED:
        behind = [farthest_behind(policy, counts_what_is_owed=owed) for owed in (True, False)]
        shown.append(f"{name:<13}{behind[0]:>20.2f}{behind[1]:>27.2f}")
    notes = [
        f"Most intervals that the disk is behind, of {NUM_STARTS} starts that resume from memory; each is",
        "killed 0.6 intervals after its first step. A save takes 0.2, and a kill cuts it.",
    ]
    return "\n".join([*shown, *notes])


def table(lines: Sequence[Line], num_failures: int) -> str:
    """Return the lines as a text of 80 columns."""
    heads = f"{'saves':<11}{'C/M':>7}{'R/M':>6}{'best':>9}{'auto':>8}"
    rows = [heads + f"{'auto':>9}{'M x 2':>7}{'M / 2':>7}{'long':>7}{'short':>7}", "-" * 78]
    for line in lines:
        point, parts = line.point, (line.auto, line.mtbf_twice, line.mtbf_half, line.prior_long, line.prior_short)
        kind = "background" if point.in_background else "clustered" if point.shape != 1 else "blocking"
        rows.append(
            f"{kind:<11}{point.cost:>7}{point.restart:>6}{_percent(line.best_overhead):>9}"
            f"{line.auto_interval:>8.4f}" + f"{_signed(parts[0]):>9}" + "".join(f"{_signed(p):>7}" for p in parts[1:])
        )
    return "\n".join([*rows, *_notes(lines, num_failures)])


def table_of_long(rows: Iterable[dict[str, float]]) -> str:
    """Return how the formulas compare where saves are long, as a text."""
    shown = [f"{'C/M':>7}{'best':>9}{'Young':>9}{'Daly':>9}", "-" * 34]
    for row in rows:
        shown.append(
            f"{row['cost']:>7}{_percent(row['best_overhead']):>9}{_signed(row['young']):>9}{_signed(row['daly']):>9}"
        )
    return "\n".join(shown)


def _notes(lines: Sequence[Line], num_failures: int) -> list[str]:
    random = [line for line in lines if line.point.shape == 1]
    worst = max(line.auto for line in random)
    wrong = max(max(line.mtbf_twice, line.mtbf_half) for line in random)
    return [
        "C: cost of a save; M: mean time between failures; R: time of a restart.",
        "best: overhead (wall / work - 1) of the best fixed interval; auto: the interval",
        "chosen, in M, and how much more overhead it has than the best, in percent;",
        "M x 2, M / 2: the same, if M is believed to be twice or half of what it is;",
        f"long, short: the same, if M is estimated from a prior that is {PRIOR_IS_WRONG_BY:.0f} times too",
        f"long or too short, over the first {RUN_FAILURES} failures of a run.",
        f"{num_failures} failures a line. Worst at random: auto {_signed(worst)}, with a wrong M {_signed(wrong)}.",
    ]


def _percent(part: float) -> str:
    return f"{100 * part:.2f} %"


def _signed(part: float) -> str:
    return f"{round(100 * part, 1) + 0.0:+.1f}"  # No -0.0.


def write_into(path: Path, text: str) -> None:
    """Replace what the page at `path` has between the marks by `text`."""
    page = path.read_text(encoding="utf-8")
    before, begin, rest = page.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (begin and end):
        raise SystemExit(f"{path} has no {' ... '.join(MARKS)}. Add both marks where the tables belong.")
    path.write_text(f"{before}{begin}\n\n```text\n{text}\n```\n\n{end}{after}", encoding="utf-8")


def _document(lines: Iterable[Line], long: Sequence[dict[str, float]], num_failures: int) -> dict[str, Any]:
    return {
        "num_failures": num_failures,
        "seed": SEED,
        "lines": [dataclasses.asdict(line) for line in lines],
        "long": list(long),
    }


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_FAILURES} failures a line")
    parser.add_argument("--docs", help="page to write the tables into, between its marks")
    parser.add_argument("--json", help="file for all figures")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
