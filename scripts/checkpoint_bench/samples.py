"""All measured figures, and their medians and ratios."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One measurement of one figure."""

    workload: str
    contender: str
    figure: str
    """Name of the figure, with its unit as the last word: cold_load_seconds, save_extra_bytes."""
    round: int
    value: float


@dataclass(frozen=True)
class Line:
    """The statistics of one figure."""

    workload: str
    contender: str
    figure: str
    median: float
    low: float
    high: float
    count: int


@dataclass
class Samples:
    """The measurements so far."""

    all: list[Sample] = field(default_factory=list)

    def add(self, workload: str, contender: str, figure: str, round: int, value: float) -> None:
        """Add one measurement."""
        self.all.append(Sample(workload, contender, figure, round, float(value)))

    def extend(self, others: Iterable[dict[str, Any]]) -> None:
        """Add measurements of another process, in the form of `to_json`."""
        self.all.extend(Sample(**other) for other in others)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the measurements as plain values."""
        return [dataclasses.asdict(sample) for sample in self.all]

    def by_round(self, workload: str, contender: str, figure: str) -> dict[int, float]:
        """Return the median of the figure in each round."""
        rounds: dict[int, list[float]] = {}
        for sample in self.all:
            if (sample.workload, sample.contender, sample.figure) == (workload, contender, figure):
                rounds.setdefault(sample.round, []).append(sample.value)
        return {number: statistics.median(values) for number, values in rounds.items()}

    def ratios(self, above: tuple[str, str, str], below: tuple[str, str, str]) -> list[float]:
        """Return `above` / `below` for each round; drift between rounds affects both."""
        over, under = self.by_round(*above), self.by_round(*below)
        return [over[number] / under[number] for number in sorted(over.keys() & under.keys()) if under[number] > 0]

    def lines(self) -> list[Line]:
        """Return the median, lowest and highest value of every figure, in the order of first measurement."""
        values: dict[tuple[str, str, str], list[float]] = {}
        for sample in self.all:
            values.setdefault((sample.workload, sample.contender, sample.figure), []).append(sample.value)
        return [Line(*key, statistics.median(v), min(v), max(v), len(v)) for key, v in values.items()]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return (median, lowest, highest)."""
    return statistics.median(values), min(values), max(values)
