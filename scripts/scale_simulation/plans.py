"""The plans of many ranks that save a llama, made by arithmetic: no process, no tensor, no memory.

The state is that of a run: fp32 parameters and both moments of AdamW with the same sharding, the step counts, which
every rank holds, and the random generators of each rank. The arithmetic is that of DTensor: chunks of
ceil(size / ranks) rows, the last ranks with less or nothing; tests compare the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from torchtitan_lite.checkpoint.format.flattening import flatten
from torchtitan_lite.models.llama.args import FLAVORS, ModelArgs

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""Offsets and sizes."""

GENERATORS = ("python", "python_gauss", "numpy", "numpy_position", "numpy_gauss", "torch", "cuda")
"""The random generators of each rank."""
GENERATOR_SHAPE = (625,)
_BY_COLUMNS = ("wo.", "w2.")
"""Weights that tensor parallelism splits along their second dimension; it splits other matrices along the first."""


@dataclass(frozen=True)
class Mesh:
    """How ranks share a model: `replicate` groups, in each `shard` times `tensor` ranks."""

    replicate: int
    shard: int
    tensor: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.replicate * self.shard * self.tensor

    def coordinate(self, rank: int) -> tuple[int, int]:
        """Return the (shard, tensor) coordinate of `rank`."""
        return rank // self.tensor % self.shard, rank % self.tensor


@dataclass(frozen=True)
class Planned:
    """One tensor of a state."""

    fqn: str
    shape: Shape
    kind: str
    """matrix, vector: sharded; number: equal on every rank; own: another one on every rank."""
    splits_columns: bool = False


def mesh_of(layout: str, num_ranks: int) -> Mesh:
    """Return a layout's mesh. fsdp: all ranks share a model; hsdp: 64 ranks or fewer do; tp: fsdp of groups of 8."""
    if layout == "fsdp":
        return Mesh(1, num_ranks)
    if layout == "hsdp":
        shard = min(64, max(1, num_ranks // 2))
        return Mesh(num_ranks // shard, shard)
    return Mesh(1, num_ranks // 8, 8)


def state_of(flavor: str) -> list[Planned]:
    """Return all tensors in the state of a llama of this size."""
    args = FLAVORS[flavor]
    tensors = []
    for name, shape in llama_shapes(args):
        kind = "matrix" if len(shape) > 1 else "vector"
        by_columns = any(part in name for part in _BY_COLUMNS)
        keys = [f"model.{name}", f"optimizer.state.{name}.exp_avg", f"optimizer.state.{name}.exp_avg_sq"]
        tensors += [Planned(key, shape, kind, by_columns) for key in keys]
        tensors.append(Planned(f"optimizer.state.{name}.step", (), "number"))
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


def plans_of_dcp(tensors: Sequence[Planned], mesh: Mesh) -> Iterator[SavePlan]:
    """Yield each rank's plan of `tensors`, as DCP's planner makes it from the rank's state dict."""
    for plan in plans(tensors, mesh):
        paths = {item.index.fqn: tuple(item.index.fqn.split(".", 1)) for item in plan.items}
        yield dataclasses.replace(plan, planner_data=paths)


def plans(tensors: Sequence[Planned], mesh: Mesh) -> Iterator[SavePlan]:
    """Yield each rank's plan of `tensors`, as this package makes it: DCP's items, and containers instead of paths."""
    for rank in range(mesh.size):
        items = [item_of(tensor, rank, mesh) for tensor in tensors]
        state: dict[str, dict[str, int]] = {}
        for item in items:
            owner, _, name = item.index.fqn.partition(".")
            state.setdefault(owner, {})[name] = 0
        yield SavePlan(items, planner_data=flatten(state)[1])


def item_of(tensor: Planned, rank: int, mesh: Mesh) -> WriteItem:
    """Return the write item of `rank` for `tensor`."""
    offsets, sizes = (torch.Size(part) for part in box_of(tensor, rank, mesh))
    is_sharded = tensor.kind in ("matrix", "vector")
    return WriteItem(
        index=MetadataIndex(tensor.fqn.format(rank), offsets),
        type=WriteItemType.SHARD if is_sharded else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(offsets, sizes), TensorProperties(torch.float32), torch.Size(tensor.shape)
        ),
    )


def box_of(tensor: Planned, rank: int, mesh: Mesh) -> Box:
    """Return the part of `tensor` that `rank` has."""
    shape = tensor.shape
    if tensor.kind not in ("matrix", "vector"):
        return (0,) * len(shape), shape
    place, column = mesh.coordinate(rank)
    if tensor.kind == "vector" or mesh.tensor == 1:
        begin, rows = _part(shape[0], mesh.shard, place)
        return (begin, *(0 for _ in shape[1:])), (rows, *shape[1:])
    if tensor.splits_columns:
        begin, rows = _part(shape[0], mesh.shard, place)
        left, columns = _part(shape[1], mesh.tensor, column)
        return (begin, left), (rows, columns)
    # FSDP shards the rows of one rank of tensor parallelism again.
    top, height = _part(shape[0], mesh.tensor, column)
    begin, rows = _part(height, mesh.shard, place)
    # DTensor puts an empty part at the end of the tensor.
    return (top + begin if rows else shape[0], 0), (rows, shape[1])


def _part(size: int, count: int, number: int) -> tuple[int, int]:
    """Return begin and size of part `number` of `count`, as torch.chunk cuts them."""
    chunk = -(-size // count)
    begin = min(size, number * chunk)
    return begin, min(size, begin + chunk) - begin
