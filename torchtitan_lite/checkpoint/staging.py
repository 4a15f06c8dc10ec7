"""A copy of the state that training can no longer change.

A `Snapshot` is taken from a local save plan: the tensors that this rank may have to write are
copied into one `StagingArena`, everything else becomes bytes at once. After `take` returns,
parameters, optimizer state, loader and counters may change: the save in flight reads only the
copy. The arena is kept from save to save, because a copy into memory never touched before costs far
more than the copy; it is memory that a writer process can map (memfd: no name, so nothing is left
behind by any crash, and no limit of /dev/shm), and pinned where there is an accelerator.
"""

from __future__ import annotations

import io
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from torchtitan_lite.log import logger

PAGE = 4096
"""Bytes. Tensors of a page or more start on page boundaries, as direct I/O asks for; smaller ones on cache lines."""
CACHE_LINE = 64


@dataclass(frozen=True)
class ArenaSlice:
    """Where in an arena a tensor lies: all that another process needs to see it."""

    offset_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class StagingArena:
    """One block of memory that holds a staged state. `fd` names it for another process."""

    def __init__(self, num_bytes: int, *, pin: bool) -> None:
        self.num_bytes = num_bytes
        self.fd = _anonymous_file(num_bytes)
        self._memory = mmap.mmap(self.fd, max(num_bytes, 1))
        self._address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._pinned = pin and _pin(self._address, num_bytes)

    def tensor(self, place: ArenaSlice) -> torch.Tensor:
        """The tensor at `place`, sharing the arena's memory."""
        return tensor_in(self._memory, place)

    def place_of(self, tensor: torch.Tensor) -> ArenaSlice:
        """The place of a tensor that `tensor` made."""
        offset = tensor.data_ptr() - self._address if tensor.numel() else 0
        return ArenaSlice(offset, tuple(tensor.shape), tensor.dtype)

    def close(self) -> None:
        """Gives the memory back once no tensor refers to it."""
        if self._pinned:
            _cudart().cudaHostUnregister(self._address)
            self._pinned = False
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def tensor_in(memory: mmap.mmap, place: ArenaSlice) -> torch.Tensor:
    """The tensor at `place` of `memory`; its storage is exactly its own bytes, so saving it saves nothing else."""
    count = torch.Size(place.shape).numel()
    if count == 0:
        return torch.empty(place.shape, dtype=place.dtype)
    return torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.offset_bytes).view(place.shape)


class Stager:
    """Takes snapshots into an arena that it keeps. One snapshot is alive at a time."""

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self.arena = StagingArena(0, pin=False)

    def take(self, plan: SavePlan, resolve: Callable[[WriteItem], torch.Tensor | io.BytesIO]) -> Snapshot:
        """Copies what `plan` names; when it returns, the originals may change. The last snapshot must be done with."""
        resolved = {item.index: resolve(item) for item in plan.items}
        tensors = {index: data for index, data in resolved.items() if isinstance(data, torch.Tensor)}
        places, num_bytes = _lay_out(tensors)
        if num_bytes > self.arena.num_bytes:
            self.arena.close()
            self.arena = StagingArena(num_bytes, pin=self._pin)
        copies = {index: self.arena.tensor(place) for index, place in places.items()}
        for index, copy in copies.items():
            copy.copy_(tensors[index].detach(), non_blocking=self._pin)
        if self._pin:
            torch.cuda.current_stream().synchronize()
        blobs = {index: data.getvalue() for index, data in resolved.items() if isinstance(data, io.BytesIO)}
        return Snapshot(tensors=copies, blobs=blobs)

    def close(self) -> None:
        """Gives the arena back."""
        self.arena.close()


@dataclass(frozen=True)
class Snapshot:
    """Staged data by DCP's index: tensors in the arena, and blobs."""

    tensors: Mapping[MetadataIndex, torch.Tensor]
    blobs: Mapping[MetadataIndex, bytes]

    def resolve(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """What `item` is to be written with."""
        if item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self.blobs[item.index])
        return self.tensors[item.index]


class SnapshotPlanner(DefaultSavePlanner):
    """A save plan whose data is a snapshot: what DCP does with it later sees no live tensor."""

    _failure: Exception | None = None

    def take(self, state: dict[str, Any], stager: Stager) -> None:
        """Plans and stages `state`; when it returns, `state` may change. Not collective.

        What fails is raised by `create_local_plan`: there every rank learns of it, where here the others would wait.
        """
        try:
            super().set_up_planner(state)
            super().create_local_plan()
            self._snapshot = stager.take(self.plan, super().resolve_data)
        except Exception as error:
            self._failure = error
        self.state_dict = {}

    def refuse(self, reason: str) -> None:
        """In place of `take`: the save fails for `reason`, on every rank."""
        self._failure = RuntimeError(reason)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        if self._failure is not None:
            raise self._failure
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._snapshot.resolve(write_item)


def _lay_out(tensors: Mapping[MetadataIndex, torch.Tensor]) -> tuple[dict[MetadataIndex, ArenaSlice], int]:
    places, end = {}, 0
    for index, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        alignment = PAGE if num_bytes >= PAGE else CACHE_LINE
        start = -(-end // alignment) * alignment
        places[index] = ArenaSlice(offset_bytes=start, shape=tuple(tensor.shape), dtype=tensor.dtype)
        end = start + num_bytes
    return places, end


def _anonymous_file(num_bytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("torchtitan_lite-staging")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, max(num_bytes, 1))
    return fd


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _pin(address: int, num_bytes: int) -> bool:
    result = _cudart().cudaHostRegister(address, num_bytes, 0)
    if int(result) != 0:
        logger.warning("Staging memory could not be pinned (CUDA error %s); copies to it will be slower.", result)
    return int(result) == 0
