"""The plan of a joint state as DCP makes it: item by item, with an object for each chunk of each rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem


def planned_by_dcp(plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Return what each rank writes of `plans`, and DCP's metadata: each item once, the bytes spread evenly.

    An item of several ranks goes to the one with the fewest bytes, the largest item first; an object to the lowest
    rank.
    """
    holders: dict[MetadataIndex, list[tuple[int, WriteItem]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append((rank, item))
    load = [0] * len(plans)
    kept: list[list[WriteItem]] = [[] for _ in plans]
    shared = []
    for held in holders.values():
        rank, item = held[0]
        if len(held) == 1 or num_bytes(item) == 0:
            load[rank] += num_bytes(item)
            kept[rank].append(item)
        else:
            shared.append(held)
    for held in sorted(shared, key=lambda held: -num_bytes(held[0][1])):
        rank, item = min(held, key=lambda place: load[place[0]])
        load[rank] += num_bytes(item)
        kept[rank].append(item)
    reduced = [dataclasses.replace(plan, items=items) for plan, items in zip(plans, kept, strict=True)]
    return DefaultSavePlanner(flatten_state_dict=False).create_global_plan(reduced)


def num_bytes(item: WriteItem) -> int:
    """Return the bytes of a chunk's elements; 0 for an object."""
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
