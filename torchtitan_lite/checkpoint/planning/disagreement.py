"""Which ranks hold other values than the rest: the minority of three holders or more, and of two both. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torchtitan_lite.log import counted

Place = tuple[int, int]
"""A group of ranks that hold the same things, and the number of one of these."""
Holdings = tuple[str, Mapping[Place, tuple[str, int]]]
"""The host of a rank, and the name and digest of each thing that it holds."""

_SHOWN = 3


def disagreement(per_rank: Sequence[Holdings]) -> str:
    """Return a text with the ranks, their hosts and what they hold otherwise; empty if all that is held is equal."""
    holders: dict[Place, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    names: dict[Place, str] = {}
    for rank, (_, held) in enumerate(per_rank):
        for place, (name, digest) in held.items():
            names[place] = name
            holders[place][digest].append(rank)
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = defaultdict(list)
    for place, by_digest in holders.items():
        if len(by_digest) > 1:
            found[_minority(list(by_digest.values()))].append(names[place])
    return "; ".join(_in_words(odd, rest, named, per_rank) for (odd, rest), named in sorted(found.items()))


def _minority(alike: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks that are outvoted, and those that are not; all and none where no value has the majority."""
    *others, most = sorted(alike, key=len)
    if len(most) <= sum(map(len, others)):
        return tuple(sorted(rank for ranks in alike for rank in ranks)), ()
    return tuple(sorted(rank for ranks in others for rank in ranks)), tuple(sorted(most))


def _in_words(odd: Sequence[int], rest: Sequence[int], names: Sequence[str], per_rank: Sequence[Holdings]) -> str:
    ranks = ", ".join(f"rank {rank} on {per_rank[rank][0]}" for rank in odd)
    more = f" and {counted(len(names) - _SHOWN, 'other tensor')}" if len(names) > _SHOWN else ""
    what = ", ".join(names[:_SHOWN]) + more
    if not rest:
        return f"{ranks} hold different values of {what}, and none has the majority"
    return f"{ranks} {'holds' if len(odd) == 1 else 'hold'} another {what} than {counted(len(rest), 'other rank')}"
