"""The states of many ranks that save a llama, made by arithmetic: no process, no tensor, no memory.

The state is that of a run: fp32 parameters and both moments of AdamW with the same sharding, the step counts, which
every rank holds, and the random generators of each rank. A shard is the placements of its tensor, from which the
package's own functions compute it; tests compare it with what DTensor makes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from torchtitan_lite.checkpoint.format.flattening import flatten
from torchtitan_lite.checkpoint.format.shards import Box, Split, box_of
from torchtitan_lite.checkpoint.format.structure import Branch
from torchtitan_lite.checkpoint.planning.rank_summary import MeshPlace, Outlined, PlanEntry, outlined
from torchtitan_lite.models.llama.args import FLAVORS, ModelArgs

Shape = tuple[int, ...]

GENERATORS = ("python", "python_gauss", "numpy", "numpy_position", "numpy_gauss", "torch", "cuda")
"""The random generators of each rank."""
GENERATOR_SHAPE = (625,)
EXPERTS = 8
STAGES = 16
LAYOUTS = ("fsdp", "hsdp", "tp", "pp", "pp_tp", "ep")
_BY_COLUMNS = ("wo.", "w2.")
"""Weights that tensor parallelism splits along their second dimension; it splits other matrices along the first."""


@dataclass(frozen=True)
class Mesh:
    """How ranks share a model: `stages`, in each `replicate` groups, in each `shard` times `tensor` ranks.

    With `experts` above 1 groups of that many ranks also divide the experts among them.
    """

    replicate: int
    shard: int
    tensor: int = 1
    stages: int = 1
    experts: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.stages * self.of_stage

    @property
    def of_stage(self) -> int:
        """Number of ranks of a stage."""
        return self.replicate * self.shard * self.tensor


@dataclass(frozen=True)
class Planned:
    """One tensor of a state."""

    fqn: str
    shape: Shape
    kind: str
    """matrix, vector, expert: sharded; number: equal on every rank; own: another one on every rank."""
    splits_columns: bool = False
    place: float = 0.0
    """Where in the model it is used: 0 at its begin, 1 at its end."""

    def stage(self, mesh: Mesh) -> int:
        """Return the stage that has it."""
        return min(int(self.place * mesh.stages), mesh.stages - 1)


def mesh_of(layout: str, num_ranks: int) -> Mesh:
    """Return the mesh of one of `LAYOUTS`, with at most that many ranks.

    fsdp: all ranks share a model; hsdp: 64 ranks or fewer do; tp: fsdp of groups of 8; pp: 16 stages of fsdp, or fewer;
    pp_tp: stages of tp; ep: fsdp, of which groups of 8 divide the experts.
    """
    if layout == "hsdp":
        shard = min(64, max(1, num_ranks // 2))
        return Mesh(num_ranks // shard, shard)
    stages = min(STAGES, max(1, num_ranks // 16)) if layout in ("pp", "pp_tp") else 1
    tensor = 8 if layout in ("tp", "pp_tp") else 1
    experts = EXPERTS if layout == "ep" else 1
    shard = num_ranks // stages // tensor // experts * experts
    return Mesh(1, shard, tensor, stages, experts)


def state_of(flavor: str, mesh: Mesh = Mesh(1, 1)) -> list[Planned]:  # a value
    """Return all tensors in the state of a llama of this size; with experts each of them has the matrices of a block's
    feed-forward part.
    """
    args = FLAVORS[flavor]
    tensors = []
    for name, shape in llama_shapes(args):
        is_expert = mesh.experts > 1 and ".feed_forward." in name
        kind = "expert" if is_expert else "matrix" if len(shape) > 1 else "vector"
        of_kind = (mesh.experts, *shape) if is_expert else shape
        by_columns = any(part in name for part in _BY_COLUMNS)
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        place = int(layer) / args.n_layers if layer else float(not name.startswith("tok_"))
        keys = [f"model.{name}", f"optimizer.state.{name}.exp_avg", f"optimizer.state.{name}.exp_avg_sq"]
        tensors += [Planned(key, of_kind, kind, by_columns, place) for key in keys]
        tensors.append(Planned(f"optimizer.state.{name}.step", (), "number", place=place))
    return tensors + [Planned(f"rng.rank{{}}.{name}", GENERATOR_SHAPE, "own") for name in GENERATORS]


def llama_shapes(args: ModelArgs) -> list[tuple[str, Shape]]:
    """Return every parameter of a llama, in the model's order."""
    kv_dim = args.n_kv_heads * args.head_dim
    shapes: list[tuple[str, Shape]] = [("tok_embeddings.weight", (args.vocab_size, args.dim))]
    for number in range(args.n_layers):
        block = {
            "attention.wq": (args.dim, args.dim),
            "attention.wk": (kv_dim, args.dim),
            "attention.wv": (kv_dim, args.dim),
            "attention.wo": (args.dim, args.dim),
            "feed_forward.w1": (args.ffn_dim, args.dim),
            "feed_forward.w2": (args.dim, args.ffn_dim),
            "feed_forward.w3": (args.ffn_dim, args.dim),
            "attention_norm": (args.dim,),
            "ffn_norm": (args.dim,),
        }
        shapes += [(f"layers.{number}.{name}.weight", shape) for name, shape in block.items()]
    return [*shapes, ("norm.weight", (args.dim,)), ("output.weight", (args.vocab_size, args.dim))]


def num_bytes(tensors: Sequence[Planned]) -> int:
    """Return the bytes of all elements in fp32, without the generators of each rank."""
    return 4 * sum(torch.Size(tensor.shape).numel() for tensor in tensors if tensor.kind != "own")


def held_by(rank: int, tensors: Sequence[Planned], mesh: Mesh) -> list[Planned]:
    """Return those of `tensors` that `rank` has a part of, or could have."""
    stage = rank // mesh.of_stage
    return [tensor for tensor in tensors if tensor.kind == "own" or tensor.stage(mesh) == stage]


def plans_of_dcp(tensors: Sequence[Planned], mesh: Mesh) -> Iterator[SavePlan]:
    """Yield each rank's plan of `tensors`, as DCP's planner makes it from the rank's state dict."""
    for rank in range(mesh.size):
        items = [item_of(tensor, rank, mesh) for tensor in held_by(rank, tensors, mesh)]
        paths = {item.index.fqn: tuple(item.index.fqn.split(".", 1)) for item in items}
        yield SavePlan(items, planner_data=paths)


def outlines(tensors: Sequence[Planned], mesh: Mesh) -> Iterator[Outlined]:
    """Yield what each rank says of `tensors`, as this package makes it, without the entries that only it has.

    Those of one stage differ only in their coordinates.
    """
    for stage in range(mesh.stages):
        first = stage * mesh.of_stage
        held = [tensor for tensor in held_by(first, tensors, mesh) if tensor.kind != "own"]
        held.sort(key=lambda tensor: tensor.fqn.partition(".")[0])
        meshes = list(dict.fromkeys(placed[0] for tensor in held if (placed := _placed(tensor, mesh)) is not None))
        places = [MeshPlace(sizes, _coordinate(0, sizes)) for sizes in meshes]
        of_first = outlined([_entry(tensor, mesh, meshes) for tensor in held], places, _structure(held))
        for rank in range(mesh.of_stage):
            coordinates = tuple(_coordinate(rank, sizes) for sizes in meshes)
            yield dataclasses.replace(of_first, outline=of_first.outline._replace(places=coordinates))


def item_of(tensor: Planned, rank: int, mesh: Mesh) -> WriteItem:
    """Return the write item of `rank` for `tensor`."""
    offsets, sizes = (torch.Size(part) for part in box_in(tensor, rank, mesh))
    is_sharded = tensor.kind in ("matrix", "vector", "expert")
    return WriteItem(
        index=MetadataIndex(tensor.fqn.format(rank), offsets),
        type=WriteItemType.SHARD if is_sharded else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(offsets, sizes), TensorProperties(torch.float32), torch.Size(tensor.shape)
        ),
    )


def box_in(tensor: Planned, rank: int, mesh: Mesh) -> Box:
    """Return the part of `tensor` that `rank` has."""
    shape = tensor.shape
    placed = _placed(tensor, mesh)
    if placed is None:
        return Box((0,) * len(shape), shape)
    sizes, placements = placed
    return box_of(shape, sizes, placements, _coordinate(rank % mesh.of_stage, sizes))


def _placed(tensor: Planned, mesh: Mesh) -> tuple[Shape, tuple[Split, ...]] | None:
    """Return the sizes of the mesh of `tensor`, and its placements there; None if every rank has all of it."""
    if tensor.kind not in ("matrix", "vector", "expert"):
        return None
    if tensor.kind == "expert":
        return (mesh.shard // mesh.experts, mesh.experts), (Split(1), Split(0))
    sizes, placements = [mesh.shard], [Split(0)]
    if mesh.replicate > 1:
        sizes, placements = [mesh.replicate, *sizes], [Split(-1), *placements]
    if mesh.tensor > 1:
        sizes.append(mesh.tensor)
        if tensor.kind == "vector":
            placements.append(Split(-1))
        elif tensor.splits_columns:
            placements.append(Split(1))
        else:
            # FSDP shards the rows of one rank of tensor parallelism again.
            placements[-1] = Split(0, mesh.tensor)
            placements.append(Split(0))
    return tuple(sizes), tuple(placements)


def _entry(tensor: Planned, mesh: Mesh, meshes: Sequence[Shape]) -> PlanEntry:
    entry = PlanEntry(tensor.fqn, "float32", tensor.shape)
    placed = _placed(tensor, mesh)
    if placed is None:
        return entry
    return entry._replace(mesh=meshes.index(placed[0]), placements=placed[1])


def _coordinate(rank: int, sizes: Shape) -> Shape:
    found = []
    for size in reversed(sizes):
        rank, place = divmod(rank, size)
        found.append(place)
    return tuple(reversed(found))


def _structure(tensors: Sequence[Planned]) -> Branch:
    state: dict[str, dict[str, int]] = {"rng": {}}
    for tensor in tensors:
        owner, _, name = tensor.fqn.partition(".")
        state.setdefault(owner, {})[name] = 0
    return flatten(state)[1]
