"""Ranks without processes and without tensors: what each says it has, and what all of them plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor.placement_types import Placement

from torchtitan_lite.checkpoint.format.flattening import flatten
from torchtitan_lite.checkpoint.format.shards import box_of, split_of
from torchtitan_lite.checkpoint.format.structure import paths_of
from torchtitan_lite.checkpoint.planning.joint_plan import JointPlan
from torchtitan_lite.checkpoint.planning.plan_cache import own_part
from torchtitan_lite.checkpoint.planning.rank_summary import HeldPart, MeshPlace, PlanEntry, outlined
from torchtitan_lite.checkpoint.planning.shared_items import SharedParts


class Has(NamedTuple):
    """What a rank has under one name: an object, a whole tensor, or its shard of one on a mesh."""

    key: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    mesh: MeshPlace | None = None
    placements: tuple[Placement, ...] = ()
    is_lowest_ranks: bool = False


class JointlyPlanned(NamedTuple):
    """What all ranks planned."""

    kept: list[list[WriteItem]]
    tensors: dict[str, Any]
    """The manifest's table."""
    metadata: bytes
    shared: list[list[SharedParts]]
    contradiction: str


def part_of(has: Has) -> HeldPart:
    """Return what the rank has of it."""
    if has.shape is None:
        return HeldPart(has.key)
    offsets, sizes = (0,) * len(has.shape), has.shape
    if has.mesh is not None:
        offsets, sizes = box_of(has.shape, has.mesh.shape, has.placements, has.mesh.coordinate)
    return HeldPart(has.key, has.dtype, has.shape, offsets, sizes)


def item_of(part: HeldPart) -> WriteItem:
    """Return the item that DCP would write of it."""
    if part.dtype is None:
        return WriteItem(MetadataIndex(part.key), WriteItemType.BYTE_IO)
    chunk = ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=part.dtype), torch.Size(part.shape))
    return WriteItem(MetadataIndex(part.key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def plan_of(of_rank: Sequence[Has]) -> SavePlan:
    """Return the plan that DCP makes on a rank which has this."""
    structure = flatten(_nested(of_rank))[1]
    return SavePlan([item_of(part_of(has)) for has in of_rank], planner_data=paths_of(structure))


def planned(ranks: Sequence[Sequence[Has]], *, of_lowest: bool = False) -> JointlyPlanned:
    """Return what ranks plan that have this, in the ranks' own way."""
    own = []
    for of_rank in ranks:
        meshes: dict[MeshPlace, int] = {}
        entries = [_entry(has, meshes) for has in of_rank]
        own.append(outlined(entries, [*meshes], flatten(_nested(of_rank))[1]))
    joint = JointPlan(of_lowest=of_lowest)
    asked = joint.ask([each.outline for each in own])
    answers = joint.answers([each.of(wanted) for each, wanted in zip(own, asked, strict=True)])
    parts = [
        own_part([part_of(has) for has in of_rank], each.sections, answer, len(ranks))
        for of_rank, each, answer in zip(ranks, own, answers, strict=True)
    ]
    assert joint.description is not None
    return JointlyPlanned(
        [[item_of(part) for part in kept] for kept, _ in parts],
        dict(joint.description.tensors),
        joint.description.metadata([])[0],
        [shared for _, shared in parts],
        answers[0].contradiction,
    )


def _entry(has: Has, meshes: dict[MeshPlace, int]) -> PlanEntry:
    if has.shape is None:
        return PlanEntry(has.key)
    entry = PlanEntry(has.key, str(has.dtype).removeprefix("torch."), has.shape, has.is_lowest_ranks)
    if has.mesh is not None:
        number = meshes.setdefault(has.mesh, len(meshes))
        return entry._replace(mesh=number, placements=tuple(map(split_of, has.placements)))
    return entry


def _nested(of_rank: Sequence[Has]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for has in of_rank:
        owner, _, name = has.key.partition(".")
        state.setdefault(owner, {})[name] = 0
    return state
