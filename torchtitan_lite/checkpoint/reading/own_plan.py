"""This rank's reads, planned by itself.

Reading goes through `dcp.load`, on each rank by itself: each rank knows what it needs.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor
from torch.futures import Future

from torchtitan_lite.checkpoint.format.contents import Shape, StoredTensor
from torchtitan_lite.checkpoint.format.shards import parts_of
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.checkpoint.reading.reader import CheckpointReader, RankReads, Region
from torchtitan_lite.checkpoint.reading.small_tensors import small_tensors
from torchtitan_lite.collection import no_collection
from torchtitan_lite.disk.reads_blocks import ReadsBlocks
from torchtitan_lite.errors import CheckpointMismatch

ALL = "all"
"""The one entry of the state that is given to `dcp.load`: a flat state."""


class OwnReader(CheckpointReader):
    """A `CheckpointReader` for `OwnPlanner`, which takes the contents from the folder instead of DCP's metadata.

    `when_read` is called once it has read what is wanted, or failed.
    """

    def __init__(self, folder: CheckpointFolder, blocks: ReadsBlocks, when_read: Callable[[], object] = bool) -> None:
        super().__init__(folder, blocks=blocks)
        self._when_read = when_read

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        finally:
            self._when_read()

    def read_metadata(self) -> Metadata:
        return Metadata(state_dict_metadata={})


class OwnPlanner(LoadPlanner):
    """Plans the reads of this rank into a flat state.

    It plans before DCP calls it, so that a mismatch on one rank can end the load before any rank reads data. It gives
    DCP an empty plan, and puts its own reads into it when it comes back.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self.wanted = RankReads()
        """What `plan` has planned."""
        self.state: dict[str, Any] = {}
        """The flat state that is read into."""

    @no_collection()
    def plan(self, state: dict[str, Any]) -> None:
        """Plan the reads into `state`. Any rank. Raises `CheckpointMismatch` for a tensor of another shape."""
        self.state = state
        contents = self._folder.contents
        small, others = small_tensors(state, contents.table)
        self.wanted = RankReads(small=small)
        regions = self.wanted.regions
        for key, target in others.items():
            if key in contents.objects:
                self.wanted.objects.append((key, partial(state.__setitem__, key)))
                continue
            stored = contents.tensors[key]
            if tuple(target.shape) != stored.shape:
                found = f"shape {list(stored.shape)} in the checkpoint, {list(target.shape)} expected"
                raise CheckpointMismatch(str(self._folder.path), f"  {key}: {found}")
            if len(stored.chunks) == 1 and not isinstance(target, DTensor):
                regions.append(Region(key, stored.chunks[0], stored.chunks[0].offsets, target.detach()))
            else:
                regions += self._regions_of(key, stored, target)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: `plan` has the state."""

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(central_plan, storage_data=self.wanted)

    def _regions_of(self, key: str, stored: StoredTensor, target: torch.Tensor) -> Iterator[Region]:
        """Yield the regions of `stored` that fill the memory of `target`. Raises `CheckpointMismatch` for a misfit."""
        try:
            parts = list(parts_of(key, target))
        except ValueError as error:
            raise CheckpointMismatch(str(self._folder.path), f"  {error}") from None
        for offsets, memory in parts:
            yield from overlaps(key, stored, offsets, memory)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("there are no items in our own plan")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        raise AssertionError("there are no items in our own plan")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        raise AssertionError("there are no items in our own plan")


def overlaps(key: str, stored: StoredTensor, offsets: Shape, local: torch.Tensor) -> Iterator[Region]:
    """Yield the overlap of each chunk of `stored` with `local`, which is at `offsets` in the whole tensor."""
    sizes = tuple(local.shape)
    for chunk in stored.near(offsets, sizes):
        if chunk.offsets == offsets and chunk.sizes == sizes:
            yield Region(key, chunk, (0,) * len(sizes), local)
            continue
        begins = tuple(map(max, chunk.offsets, offsets))
        lengths = tuple(
            min(stored + n, own + m) - begin
            for stored, n, own, m, begin in zip(chunk.offsets, chunk.sizes, offsets, sizes, begins, strict=True)
        )
        if min(lengths, default=1) <= 0:
            continue
        target = local
        for dim, (begin, own, length) in enumerate(zip(begins, offsets, lengths, strict=True)):
            target = target.narrow(dim, begin - own, length)
        yield Region(
            key, chunk, tuple(begin - stored for begin, stored in zip(begins, chunk.offsets, strict=True)), target
        )
