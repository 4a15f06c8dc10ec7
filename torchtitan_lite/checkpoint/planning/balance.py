"""Which of the ranks that hold an item writes it. Pure, coordinator only."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from torchtitan_lite.checkpoint.format.chunk_runs import LEAST_CHUNKS
from torchtitan_lite.checkpoint.planning.shared_items import Holders


def balanced(plans: Sequence[SavePlan], holders: Holders, *, of_lowest: bool = False) -> list[list[int]]:
    """Return for each rank the numbers of those of its items that it writes: each item once, the bytes spread evenly.

    An item of only one rank stays there. Objects, and the items whose numbers are in a plan's storage data, go to the
    lowest rank that has them; with `of_lowest` all do. The others go, the largest first, to the rank with the fewest
    bytes among their holders (Graham's rule: at most 4/3 of the best possible).
    """
    load = [0] * len(plans)
    alone: list[list[int]] = [[] for _ in plans]
    kept: list[list[int]] = [[] for _ in plans]
    shared: list[tuple[int, Sequence[tuple[int, int]]]] = []
    for held in holders.values():
        rank, number = held[0]
        num_bytes = _num_bytes(plans[rank].items[number])
        is_the_lowest_ranks = of_lowest or any(number in (plans[rank].storage_data or ()) for rank, number in held)
        if len(held) == 1 or num_bytes == 0 or is_the_lowest_ranks:
            # Counted before the shared items are given out: this rank has to write it in any case.
            load[rank] += num_bytes
            (alone if len(held) == 1 else kept)[rank].append(number)
        else:
            shared.append((num_bytes, held))
    # The largest first: then no two ranks differ by more than the largest item. DCP goes through them in their order.
    for num_bytes, held in sorted(shared, key=lambda pair: -pair[0]):
        rank, number = min(held, key=lambda place: load[place[0]])
        load[rank] += num_bytes
        kept[rank].append(number)
    if len(plans) < LEAST_CHUNKS:
        return [sorted(alone[rank] + kept[rank]) for rank in range(len(plans))]
    return [_in_file_order(plan.items, alone[rank], kept[rank]) for rank, plan in enumerate(plans)]


def _in_file_order(items: Sequence[WriteItem], alone: list[int], shared: list[int]) -> list[int]:
    """Return the numbers of the `items` that only this rank has and of others that it writes, as they lie in its file.

    Chunks of cut tensors come first, and of these the ones that no other rank has: so equal chunks begin at the same
    byte of every rank's file, and the manifest needs one run for all of them (chunk_runs.py).
    """
    of_cut = [[number for number in sorted(numbers) if _is_cut(items[number])] for numbers in (alone, shared)]
    cut = [*of_cut[0], *of_cut[1]]
    return [*cut, *sorted({*alone, *shared} - {*cut})]


def _is_cut(item: WriteItem) -> bool:
    """Return whether `item` is a chunk with elements, but not with all those of its tensor."""
    return item.tensor_data is not None and 0 < item.tensor_data.chunk.sizes.numel() < item.tensor_data.size.numel()


def _num_bytes(item: WriteItem) -> int:
    """Return the bytes of a chunk's elements; 0 for an object. (`tensor_storage_size` is of the whole tensor.)"""
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
