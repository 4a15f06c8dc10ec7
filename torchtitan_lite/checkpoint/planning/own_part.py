"""What this rank writes, and what it shares, as it follows from the coordinator's answer."""

from __future__ import annotations

import dataclasses
import pickle
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from torchtitan_lite.checkpoint.format.chunk_runs import LEAST_CHUNKS
from torchtitan_lite.checkpoint.planning.plan_answers import PlanAnswer, SectionAnswer
from torchtitan_lite.checkpoint.planning.shared_items import SharedItems


class _OwnEntry(NamedTuple):
    number: int
    """Of the item in this rank's plan."""
    number_of_all: int
    is_decided: bool
    pattern: int


class OwnPart:
    """What the rank with these `items`, in `sections` with these `numbers`, has to know of the `answer`."""

    def __init__(
        self, items: Sequence[WriteItem], sections: Sequence[range], numbers: Sequence[int], answer: PlanAnswer
    ) -> None:
        self._items = items
        self._answer = answer
        self._sections = sorted(zip(numbers, sections, answer.sections, strict=True))

    def kept(self, world_size: int) -> list[WriteItem]:
        """Return the items that it writes, in the order of its file: see `JointPlan`."""
        decided = {*np.frombuffer(self._answer.kept, dtype=np.uint32).tolist()}
        parts: list[list[WriteItem]] = [[], [], []]
        for entry in self._entries():
            item = self._items[entry.number]
            if entry.number_of_all in decided if entry.is_decided else _has_elements(item):
                is_cut = world_size >= LEAST_CHUNKS and _is_cut(item)
                parts[int(entry.is_decided) if is_cut else 2].append(_whole_if_empty(item))
        return [item for part in parts for item in part]

    def shared(self) -> list[SharedItems]:
        """Return what it shares with others, group by group."""
        numbers: dict[int, list[int]] = {}
        for entry in self._entries():
            if entry.pattern >= 0 and _has_elements(self._items[entry.number]):
                numbers.setdefault(entry.pattern, []).append(entry.number)
        found = []
        for pattern, group, lowest, previous, following, sample_bytes in self._answer.members:
            # By name: other ranks of the group may have them in another order.
            of_group = sorted(numbers.get(pattern, ()), key=self._name)
            if of_group:
                found.append(SharedItems(group, lowest, previous, following, of_group, sample_bytes))
        return found

    def _name(self, number: int) -> tuple[str, Sequence[int]]:
        index = self._items[number].index
        return index.fqn, tuple(index.offset or ())

    def _entries(self) -> Iterator[_OwnEntry]:
        for _, numbers, packed in self._sections:
            answered = SectionAnswer(*pickle.loads(zlib.decompress(packed)))
            for at, (number, is_decided, pattern) in enumerate(
                zip(numbers, answered.is_decided, answered.patterns, strict=True)
            ):
                yield _OwnEntry(number, answered.first + at, bool(is_decided), pattern)


def _whole_if_empty(item: WriteItem) -> WriteItem:
    """Return `item` with all of its tensor, if that has no elements."""
    data = item.tensor_data
    if data is None or data.size.numel() or data.chunk.sizes == data.size:
        return item
    chunk = ChunkStorageMetadata(torch.Size([0] * len(data.size)), data.size)
    index = MetadataIndex(item.index.fqn, chunk.offsets)
    return dataclasses.replace(item, index=index, tensor_data=dataclasses.replace(data, chunk=chunk))


def _has_elements(item: WriteItem) -> bool:
    return item.tensor_data is not None and item.tensor_data.chunk.sizes.numel() > 0


def _is_cut(item: WriteItem) -> bool:
    """Return whether `item` is a chunk with elements, but not with all those of its tensor."""
    return item.tensor_data is not None and 0 < item.tensor_data.chunk.sizes.numel() < item.tensor_data.size.numel()
