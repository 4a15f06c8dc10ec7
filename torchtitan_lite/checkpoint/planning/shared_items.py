"""What several ranks hold alike, sorted by the ranks that hold it.

Ranks that hold the same items are a group: all ranks under DDP, the replicas of one shard under HSDP. Training keeps
parameters and optimizer states equal within a group; rank_comparison.py looks whether it does. Tensors that are placed
alike have the same groups, which are found once, as a `Pattern`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchtitan_lite.checkpoint.planning.placement import Numbers

SAMPLE_BYTES = 1 << 16
"""Bytes of what it shares that a rank samples at a save, at most: 1 ms, where a megabyte takes 8."""


class Member(NamedTuple):
    """A rank's place in one of its groups."""

    pattern: int
    group: int
    """The number of the group."""
    lowest: int
    previous: int | None
    """The next lower rank of the group; None on the lowest."""
    next: int | None
    sample_bytes: int
    """The part of `SAMPLE_BYTES` that is for this group: the same on all its ranks."""


SharedParts = tuple[Member, list[int]]
"""What a group of ranks holds alike, for one of them: its place, and the numbers of its parts, in one order on all."""


class Patterns:
    """The different ways in which ranks share tensors, each by number. Coordinator only, pure."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._groups: list[tuple[Numbers, Numbers]] = []

    def number_of(self, ranks: Numbers, counts: Numbers) -> int:
        """Return the number of the pattern of these groups: of `ranks` the first `counts[0]`, and so on; ascending.

        Groups of one rank share nothing; -1 if there are no others.
        """
        is_shared = counts > 1
        if not is_shared.any():
            return -1
        if not is_shared.all():
            ranks, counts = ranks[np.repeat(is_shared, counts)], counts[is_shared]
        order = np.argsort(ranks, kind="stable")
        lowest = np.repeat(ranks[np.cumsum(counts) - counts], counts)
        number = self._numbers.setdefault(ranks[order].tobytes() + lowest[order].tobytes(), len(self._groups))
        if number == len(self._groups):
            self._groups.append((ranks, counts))
        return number

    def members(self, num_ranks: int) -> tuple[list[list[Member]], int]:
        """Return the places of each rank in groups, and the number of all groups."""
        num_patterns: Numbers = np.zeros(num_ranks, dtype=np.int64)
        for ranks, _ in self._groups:
            num_patterns[ranks] += 1
        members: list[list[Member]] = [[] for _ in range(num_ranks)]
        group = 0
        for pattern, (all_ranks, counts) in enumerate(self._groups):
            sample_bytes = SAMPLE_BYTES // int(num_patterns[all_ranks].max())
            for ranks in np.split(all_ranks, np.cumsum(counts)[:-1]):
                neighbours = zip((None, *ranks[:-1].tolist()), ranks.tolist(), (*ranks[1:].tolist(), None), strict=True)
                for previous, rank, following in neighbours:
                    members[rank].append(Member(pattern, group, int(ranks[0]), previous, following, sample_bytes))
                group += 1
        return members, group
