"""Every figure that was measured, one by one, and what is made of them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One figure, measured once."""

    workload: str
    contender: str
    figure: str
    """What it is, and its unit as the last word: cold_load_seconds, save_extra_bytes."""
    round: int
    value: float


@dataclass(frozen=True)
class Line:
    """The samples of one figure."""

    workload: str
    contender: str
    figure: str
    median: float
    low: float
    high: float
    count: int


@dataclass
class Samples:
    """What was measured so far."""

    all: list[Sample] = field(default_factory=list)

    def add(self, workload: str, contender: str, figure: str, round: int, value: float) -> None:
        """Takes note of one figure."""
        self.all.append(Sample(workload, contender, figure, round, float(value)))

    def extend(self, others: Iterable[dict[str, Any]]) -> None:
        """Takes note of figures from elsewhere, as `to_json` gives them."""
        self.all.extend(Sample(**other) for other in others)

    def to_json(self) -> list[dict[str, Any]]:
        """Plain values."""
        return [dataclasses.asdict(sample) for sample in self.all]

    def by_round(self, workload: str, contender: str, figure: str) -> dict[int, float]:
        """Of each round the median of the figure."""
        rounds: dict[int, list[float]] = {}
        for sample in self.all:
            if (sample.workload, sample.contender, sample.figure) == (workload, contender, figure):
                rounds.setdefault(sample.round, []).append(sample.value)
        return {number: statistics.median(values) for number, values in rounds.items()}

    def ratios(self, above: tuple[str, str, str], below: tuple[str, str, str]) -> list[float]:
        """`above` by `below`, round by round: what drifts from one round to another is in both."""
        over, under = self.by_round(*above), self.by_round(*below)
        return [over[number] / under[number] for number in sorted(over.keys() & under.keys()) if under[number] > 0]

    def lines(self) -> list[Line]:
        """Every figure's median, lowest and highest value, in the order of their first measurement."""
        values: dict[tuple[str, str, str], list[float]] = {}
        for sample in self.all:
            values.setdefault((sample.workload, sample.contender, sample.figure), []).append(sample.value)
        return [Line(*key, statistics.median(v), min(v), max(v), len(v)) for key, v in values.items()]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, lowest, highest)."""
    return statistics.median(values), min(values), max(values)
