"""The place of this rank's shard in the whole tensor.

The box that a DTensor's placements give a rank is compared with the shape of the rank's memory before
anything is written from it or read into it; if they differ, the tensor is refused by name. Saves, loads,
the check after a load and the initial weights all use these functions, so they cannot disagree.

`_StridedShard` is FSDP2's placement for "the mesh dimensions to my right were split first": `fully_shard`
cuts what tensor parallelism has left on a rank with `torch.chunk`. DTensor's own arithmetic
(`compute_local_shape_and_global_offset`) splits from left to right instead, which gives other boxes
where sizes do not divide: 13 rows on 3 (FSDP) x 2 (TP) are 3, 3 and 1 rows of the first 7, not 3, 3
and 2. So it is not used here.

The shapes do not show rows that are in another rank's place: on a mesh of ranks [1, 0], `fully_shard` and
`full_tensor` count by the process group, which is always ascending, and `redistribute` and DCP by the mesh.
A tensor that is sharded on such a mesh is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from torchtitan_lite.torch_private import chunks_of, lists_its_chunks, shard_at

Shape = tuple[int, ...]
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""torch's own classes of plain tensors."""


class Box(NamedTuple):
    """A part of a tensor. An empty box begins behind the last element, so that it never equals another rank's box."""

    offsets: Shape
    sizes: Shape


class LocalShard(NamedTuple):
    """Memory of this rank, and the offsets of its first element in the whole tensor."""

    offsets: Shape
    memory: torch.Tensor


class Split(NamedTuple):
    """A placement without torch: along one dimension of a mesh."""

    dim: int
    """The dimension of the tensor that it splits; -1 for none."""
    split_factor: int = 1
    """Into how many parts dimensions of the mesh to the right split it before."""


def box_of(shape: Shape, mesh: Shape, placements: Sequence[Placement | Split], coordinate: Sequence[int]) -> Box:
    """Return the box of a tensor of `shape` that the rank at `coordinate` in a mesh of these sizes holds.

    Raises ValueError for placements whose shards are not boxes, and for partial sums.
    """
    for placement in placements:
        if isinstance(placement, Placement) and placement.is_partial():
            raise ValueError(f"{placement} is a sum that is still to be reduced. Redistribute it first.")
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, whole in enumerate(shape):
        for mesh_dim in split_order(dim, mesh, placements):
            num_rows = -(-sizes[dim] // mesh[mesh_dim])  # of each shard, fewer in the last ones, as torch.chunk cuts
            begin = min(coordinate[mesh_dim] * num_rows, sizes[dim])
            offsets[dim] += begin
            sizes[dim] = min(num_rows, sizes[dim] - begin)
        if sizes[dim] == 0:
            offsets[dim] = whole
    return Box(tuple(offsets), tuple(sizes))


def split_of(placement: Placement) -> Split:
    """Return what `placement` says about its dimension of the mesh."""
    return Split(getattr(placement, "dim", -1), getattr(placement, "split_factor", 1))


def sharding_text(mesh: Sequence[int], placements: Sequence[Placement | Split]) -> str:
    """Return how a tensor is sharded, as text; empty for one on no mesh. Equal texts mean equal shards on each rank."""
    splits = [split if isinstance(split, Split) else split_of(split) for split in placements]
    words = [f"shard{split.dim}" if split.dim >= 0 else "replicate" for split in splits]
    strided = [f"/{split.split_factor}" if split.split_factor > 1 else "" for split in splits]
    names = ",".join(word + more for word, more in zip(words, strided, strict=True))
    return f"{names} on {'x'.join(map(str, mesh))}" if names else ""


def split_order(dim: int, mesh: Shape, placements: Sequence[Placement | Split]) -> list[int]:
    """Return the mesh dimensions that split dimension `dim` of a tensor, in the order of the splits.

    Raises ValueError for placements whose shards are not boxes.
    """
    order: list[int] = []
    for mesh_dim in reversed(range(len(placements))):
        placement = placements[mesh_dim]
        if getattr(placement, "dim", None) != dim or mesh[mesh_dim] == 1:
            continue
        before, splits = 0, 1
        factor = getattr(placement, "split_factor", 1)
        while splits < factor and before < len(order):
            splits *= mesh[order[before]]
            before += 1
        if splits != factor:
            raise ValueError(
                f"{list(placements)} on a mesh of {list(mesh)} gives ranks rows that are not contiguous. "
                "Redistribute it to Shard or Replicate first."
            )
        order.insert(before, mesh_dim)
    return order


def local_shards(name: str, tensor: torch.Tensor) -> Iterator[LocalShard]:
    """Yield each part of `tensor` that this rank has; none if the rank is outside the mesh.

    Raises ValueError, which begins with `name`, if the memory does not have the shape that the placements give it.
    """
    if not isinstance(tensor, DTensor):
        yield LocalShard((0,) * tensor.dim(), tensor.detach())
        return
    if tensor.device_mesh.get_coordinate() is None:
        return
    if knows_its_parts(tensor):
        for chunk in chunks_of(tensor):
            memory = shard_at(tensor, MetadataIndex(name, chunk.offsets))
            yield _checked_shard(name, tensor, Box(tuple(chunk.offsets), tuple(chunk.sizes)), memory.detach())
        return
    yield part_of(name, tensor)


def part_of(name: str, tensor: DTensor) -> LocalShard:
    """Return the single part of `tensor` that this rank has. Ranks in its mesh only. Raises as `local_shards`."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "part_of was called on a rank outside the mesh"
    try:
        box = box_of(tuple(tensor.shape), tuple(tensor.device_mesh.shape), tensor.placements, coordinate)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    _check_order(name, tensor, coordinate)
    return _checked_shard(name, tensor, box, tensor.to_local().detach())


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory that this rank has of `tensor`, which may be a plain one."""
    if not isinstance(tensor, DTensor):
        return tensor
    if torch.is_grad_enabled():  # Then `to_local` makes a new view, under autograd.
        with torch.no_grad():
            return tensor.to_local()
    return tensor.to_local()


def has_same_form(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether both have the same dtype, shape and device, and are sharded alike."""
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device) or isinstance(a, DTensor) != isinstance(b, DTensor):
        return False
    return not (isinstance(a, DTensor) and isinstance(b, DTensor)) or (
        a.placements == b.placements and a.device_mesh == b.device_mesh
    )


def knows_its_parts(tensor: DTensor) -> bool:
    """Return whether the local tensor of `tensor` itself reports to DCP which parts it holds, maybe several."""
    return lists_its_chunks(local_of(tensor))


def _check_order(name: str, tensor: DTensor, coordinate: Sequence[int]) -> None:
    mesh = tensor.device_mesh
    for dim, placement in enumerate(tensor.placements):
        if mesh.size(dim) == 1 or placement.is_replicate():
            continue
        in_group = mesh.get_local_rank(dim)
        if in_group != coordinate[dim]:
            raise ValueError(
                f"{name}: this rank is number {coordinate[dim]} of dimension {dim} of its device mesh and number "
                f"{in_group} of the process group of that dimension, so which shard it has depends on who made it. "
                "Make a mesh whose ranks ascend, as init_device_mesh does."
            )


def _checked_shard(name: str, tensor: DTensor, box: Box, memory: torch.Tensor) -> LocalShard:
    both_are_empty = memory.numel() == 0 and 0 in box.sizes
    if tuple(memory.shape) != box.sizes and not both_are_empty:
        raise ValueError(
            f"{name}: the rank at {list(tensor.device_mesh.get_coordinate() or ())} of a mesh of "
            f"{list(tensor.device_mesh.shape)} has {list(memory.shape)} in memory, where "
            f"{list(tensor.placements)} of {list(tensor.shape)} gives it {list(box.sizes)} at {list(box.offsets)}. "
            "Make it with fully_shard, parallelize_module or distribute_tensor, or give from_local the whole shape."
        )
    return LocalShard(box.offsets, memory.reshape(box.sizes))
