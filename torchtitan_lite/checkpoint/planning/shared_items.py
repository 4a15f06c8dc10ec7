"""The items of a plan that several ranks hold, sorted by the ranks that hold them. Coordinator only, pure.

Ranks that hold the same items are a group: all ranks under DDP, the replicas of one shard under HSDP. Training keeps
parameters and optimizer states equal within a group; rank_comparison.py looks whether it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

SAMPLE_BYTES = 1 << 16
"""Bytes of what it shares that a rank samples at a save, at most: 1 ms, where a megabyte takes 8."""

Holders = Mapping[MetadataIndex, Sequence[tuple[int, int]]]
"""For each item the ranks that hold it, ascending, each with the item's number in its plan."""


@dataclass(frozen=True)
class SharedItems:
    """What a group of ranks holds alike, for one of them."""

    group: int
    """The number of the group."""
    lowest: int
    previous: int | None
    """The next lower rank of the group; None on the lowest."""
    next: int | None
    numbers: Sequence[int]
    """Of the items in this rank's plan, in the same order on all ranks of the group."""
    sample_bytes: int
    """The part of `SAMPLE_BYTES` that is for this group: the same on all its ranks."""


def holders_of(plans: Sequence[SavePlan]) -> tuple[Holders, dict[str, dict[int, str]]]:
    """Return the holders of each item, and what contradicts the lowest rank that has a tensor of the name.

    The second is by key and rank: the shape and dtype there, the lowest rank's first. Such a tensor of a parameter or
    an optimizer state has no place in a checkpoint; of any other state the lowest rank's is saved. A rank that
    contradicts holds nothing of that name.
    """
    holders: dict[MetadataIndex, list[tuple[int, int]]] = {}
    kinds: dict[str, tuple[tuple[object, object], int]] = {}
    odd: dict[str, dict[int, str]] = {}
    for rank, plan in enumerate(plans):
        of_lowest = plan.storage_data or ()
        for number, item in enumerate(plan.items):
            if (data := item.tensor_data) is not None:
                kind = (data.size, data.properties.dtype)
                first, lowest = kinds.setdefault(item.index.fqn, (kind, rank))
                if first != kind:
                    if number not in of_lowest:
                        odd.setdefault(item.index.fqn, {lowest: _described(*first)})[rank] = _described(*kind)
                    continue
            holders.setdefault(item.index, []).append((rank, number))
    return holders, odd


def shared_by_rank(plans: Sequence[SavePlan], holders: Holders) -> tuple[list[list[SharedItems]], int]:
    """Return what each rank shares with others, and the number of groups.

    Without the items whose numbers are in a plan's storage data, which the ranks compare as values (replicas.py).
    """
    columns: dict[tuple[int, ...], list[list[int]]] = {}
    for held in holders.values():
        if len(held) == 1:
            continue
        rank, number = held[0]
        data = plans[rank].items[number].tensor_data
        if data is None or not data.chunk.sizes.numel() or number in (plans[rank].storage_data or ()):
            continue
        ranks = tuple(rank for rank, _ in held)
        for column, (_, number) in zip(columns.setdefault(ranks, [[] for _ in ranks]), held, strict=True):
            column.append(number)
    num_groups_of = [0] * len(plans)
    for ranks in columns:
        for rank in ranks:
            num_groups_of[rank] += 1
    shared: list[list[SharedItems]] = [[] for _ in plans]
    for group, (ranks, of_ranks) in enumerate(columns.items()):
        sample_bytes = SAMPLE_BYTES // max(num_groups_of[rank] for rank in ranks)
        neighbours = zip((None, *ranks[:-1]), ranks, (*ranks[1:], None), of_ranks, strict=True)
        for previous, rank, following, numbers in neighbours:
            shared[rank].append(SharedItems(group, ranks[0], previous, following, _compact(numbers), sample_bytes))
    return shared, len(columns)


def _compact(numbers: list[int]) -> Sequence[int]:
    """Return `numbers`, as a range if they are one: it is sent to a rank in a few bytes."""
    whole = range(numbers[0], numbers[-1] + 1)
    return whole if len(whole) == len(numbers) and all(a == b for a, b in zip(whole, numbers, strict=True)) else numbers


def _described(size: object, dtype: object) -> str:
    return f"{list(size)} of {dtype}"  # type: ignore[call-overload]  # a torch.Size
