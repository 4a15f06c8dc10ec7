"""For how many arenas the free memory of a host is enough.

Between two steps a process has less memory than at its peak within them: the difference is reserved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torchtitan_lite.host_memory import figures, free_memory_bytes, parse_number

# One holds the image that all ranks have, one is being written or digested, and one is for the next copy.
MAX_ARENAS = 3
REPLICATED_ARENAS = 4
"""With replicas: one more has the image whose replicas are complete."""
_REPLICAS = 2
"""Of each rank at its partner: one that is valid, one that arrives."""
_USED = 0.8
"""The part of the free memory that arenas may take: what else grows takes the rest."""
_GROWTH = 0.5
"""The part of its own peak by which a process may still grow: the first step, after which the ranks look, is not yet
the last peak. By hand, a small model on a CPU grew from 0.56 to 0.87 GiB in its second step.
"""


class Room(NamedTuple):
    """What a rank knows of the memory of its host."""

    host: str
    arena_bytes: int
    """Of one arena; negative if unknown."""
    have_bytes: int
    """Of the arenas that it has."""
    free_bytes: int
    reserve_bytes: int = 0
    """What training takes of that, at its peak."""
    replica_bytes: int = 0
    """Of the replicas that its host has already."""
    oom_kills: int = 0
    """The processes that were killed because the cgroup of the job was full."""


def num_arenas(ranks: Sequence[Room]) -> int:
    """Return how many arenas of its size each rank can have, at most `MAX_ARENAS`; less than 2 is not enough.

    Each process that was killed for memory makes it one less: the job may have been the one that did not fit.
    """
    if any(rank.arena_bytes < 0 for rank in ranks):
        return 0
    most = MAX_ARENAS - max((rank.oom_kills for rank in ranks), default=0)
    return next((count for count in range(most, 0, -1) if not _full(ranks, count, {})), 0)


def has_no_room_for_replicas(ranks: Sequence[Room], to: Sequence[int]) -> str:
    """Return a host without room for `REPLICATED_ARENAS` of each rank and two replicas of each that sends some there.

    `to` has by rank the one that keeps its replicas. Empty if all have it.
    """
    foreign = {rank.host: 0 for rank in ranks}
    for rank, partner in zip(ranks, to, strict=True):
        foreign[ranks[partner].host] += _REPLICAS * rank.arena_bytes
    if any(rank.arena_bytes < 0 or rank.oom_kills for rank in ranks):
        return ranks[0].host
    return _full(ranks, REPLICATED_ARENAS, foreign)


def _full(ranks: Sequence[Room], count: int, foreign: Mapping[str, int]) -> str:
    """Return a host that has no room for `count` arenas of each of its ranks, and `foreign` bytes; empty for none."""
    for host in dict.fromkeys(rank.host for rank in ranks):
        here = [rank for rank in ranks if rank.host == host]
        needed = sum(max(0, count * rank.arena_bytes - rank.have_bytes) for rank in here)
        needed += max(0, foreign.get(host, 0) - max(rank.replica_bytes for rank in here))
        # What is free between two steps is more than what training leaves free at its peak.
        free = min(rank.free_bytes for rank in here) - sum(rank.reserve_bytes for rank in here)
        if needed > _USED * free and needed > 0:
            return host
    return ""


def is_short(root: Path = Path("/")) -> bool:
    """Return whether the next step could need more memory than is free: it needs as much as the steps before it."""
    _, growth = _own_bytes(root)
    return growth > free_memory_bytes(root)


def reserve_bytes(root: Path = Path("/")) -> int:
    """Return how many more bytes this process may take: up to its peak so far, and a part of that peak."""
    peak, growth = _own_bytes(root)
    return growth + int(_GROWTH * peak)


def _own_bytes(root: Path) -> tuple[int, int]:
    """Return the most that this process had, and how much less it has now; 0 where the system does not say."""
    found = figures(root / "proc/self/status")
    peak, now = (1024 * (parse_number(found.get(name, "")) or 0) for name in ("VmHWM:", "VmRSS:"))
    return peak, max(0, peak - now)
