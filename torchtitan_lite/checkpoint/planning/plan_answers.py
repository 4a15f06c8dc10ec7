"""What the coordinator says to each rank about its part of the joint plan."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from torchtitan_lite.checkpoint.planning.outline import Digest
from torchtitan_lite.checkpoint.planning.shared_items import Member
from torchtitan_lite.checkpoint.planning.spread import Numbers


class Asked(NamedTuple):
    """What the coordinator says of a rank's outline."""

    numbers: tuple[int, ...]
    """Of the rank's sections, among those of all ranks: what it writes lies in its file in this order."""
    wanted: tuple[Digest, ...]
    """The pieces that it sends."""


class PlanAnswer(NamedTuple):
    """What the coordinator answers to a rank."""

    sections: tuple[bytes, ...]
    """A packed `SectionAnswer` for each of the rank's sections."""
    kept: bytes
    """The numbers of those of its decided entries that it writes, 4 bytes each."""
    members: list[Member] = []  # noqa: RUF012  # never changed
    num_groups: int = 0
    contradiction: str = ""


class SectionAnswer(NamedTuple):
    """What each rank that has a section needs to know of it."""

    first: int
    """The number of its first entry among those of all sections."""
    is_decided: bytes
    """For each entry 1 if the coordinator decides who writes it; a rank writes what it has of the others."""
    patterns: list[int]
    """For each entry the number of the pattern of those that share it, or -1."""


class KeptEntries:
    """Which of the decided entries each rank writes."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ranks: list[Numbers] = []
        self._numbers: list[int] = []

    def add(self, number: int, ranks: Numbers) -> None:
        """Let each of `ranks` write its part of entry `number`."""
        self._ranks.append(ranks)
        self._numbers.append(number)

    def by_rank(self) -> Iterator[bytes]:
        """Yield the numbers for each rank."""
        if not self._ranks:
            yield from (b"" for _ in range(self._num_ranks))
            return
        ranks = np.concatenate(self._ranks)
        numbers = np.repeat(np.array(self._numbers, dtype=np.uint32), [len(each) for each in self._ranks])
        order = np.argsort(ranks, kind="stable")
        ends = 4 * np.searchsorted(ranks[order], np.arange(self._num_ranks + 1))
        packed = numbers[order].tobytes()
        yield from (packed[begin:end] for begin, end in pairwise(ends.tolist()))
