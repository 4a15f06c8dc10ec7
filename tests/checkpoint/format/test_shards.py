"""The place of a rank's memory in the whole tensor is what fully_shard really makes, for every size and rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_lite.checkpoint.format.shards import box_of, local_shards

UNEVEN = (1, 5, 7, 9, 13, 17, 33, 97, 105)


def after_fully_shard(whole: Tensor, coordinate: dict[str, int], mesh: dict[str, int], dims: dict[str, int]) -> Tensor:
    """Return the shard of `whole` on the rank at `coordinate` after tensor parallelism and then fully_shard."""
    for name in ("tp", "dp"):
        chunks = list(whole.chunk(mesh[name], dims[name]))
        index = coordinate[name]
        whole = chunks[index] if index < len(chunks) else whole.narrow(dims[name], 0, 0)
    return whole


def cut(whole: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    for dim, (begin, size) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(dim, min(begin, whole.size(dim)), size)
    return whole


def placements(order: Sequence[str], mesh: dict[str, int], dims: dict[str, int]) -> list[Placement]:
    """Return the placements that fully_shard gives after tensor parallelism.

    They are strided only if the dimension of tensor parallelism is further right in the mesh.
    """
    is_strided = dims["dp"] == dims["tp"] and order.index("dp") < order.index("tp") and mesh["tp"] > 1
    strided = _StridedShard(dims["dp"], split_factor=mesh["tp"])
    of_each = {"dp": strided if is_strided else Shard(dims["dp"]), "tp": Shard(dims["tp"]), "rep": Replicate()}
    return [of_each[name] for name in order]


def check_all_ranks(shape: tuple[int, ...], order: Sequence[str], mesh: dict[str, int], dims: dict[str, int]) -> None:
    """Check that every rank's box is what it has in memory and that one replica's boxes hold each element once."""
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    seen = torch.zeros(whole.numel(), dtype=torch.int64)
    boxes = set()
    for coordinate in itertools.product(*(range(mesh[name]) for name in order)):
        sizes = tuple(mesh[name] for name in order)
        box = box_of(shape, sizes, placements(order, mesh, dims), coordinate)
        found = cut(whole, *box)
        expected = after_fully_shard(whole, dict(zip(order, coordinate, strict=True)), mesh, dims)
        assert torch.equal(found, expected), f"{shape} at {coordinate} of {mesh}"
        if box not in boxes:
            boxes.add(box)
            seen += torch.bincount(found.reshape(-1), minlength=whole.numel())
    assert bool((seen == 1).all())


@pytest.mark.parametrize("order", [("dp", "tp"), ("tp", "dp"), ("rep", "dp", "tp")], ids="-".join)
@pytest.mark.parametrize(
    "dims", [{"dp": 0, "tp": 0}, {"dp": 0, "tp": 1}, {"dp": 1, "tp": 0}, {"dp": 1, "tp": 1}], ids=str
)
@pytest.mark.parametrize("size", UNEVEN)
def test_the_box_of_a_rank_is_the_shard_that_fully_shard_makes(
    size: int, dims: dict[str, int], order: tuple[str, ...]
) -> None:
    for dp, tp in ((3, 2), (2, 3), (4, 2), (8, 2), (2, 1), (1, 2)):
        check_all_ranks((size, 6), order, {"dp": dp, "tp": tp, "rep": 2}, dims)


@pytest.mark.parametrize(("dp", "tp"), [(4, 2), (8, 2)])
def test_the_shards_of_a_vocabulary_that_does_not_divide_cover_it(dp: int, tp: int) -> None:
    check_all_ranks((50257, 2), ("dp", "tp"), {"dp": dp, "tp": tp}, {"dp": 0, "tp": 0})


@given(st.integers(0, 60), st.integers(1, 6), st.integers(1, 6))
def test_two_boxes_with_elements_never_begin_at_the_same_place(size: int, dp: int, tp: int) -> None:
    order, dims, mesh = ("dp", "tp"), {"dp": 0, "tp": 0}, {"dp": dp, "tp": tp}
    boxes = [box_of((size,), (dp, tp), placements(order, mesh, dims), (i, j)) for i in range(dp) for j in range(tp)]
    starts = {box.offsets for box in boxes if box.sizes != (0,)}
    assert len(starts) == len([box for box in boxes if box.sizes != (0,)])
    assert not any(box.offsets in starts for box in boxes if box.sizes == (0,))


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """Make this process one rank of a group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # Otherwise the next rank's tensors would be on the mesh of this one.


@pytest.mark.parametrize("size", [13, 97, 50257])
@pytest.mark.parametrize(
    ("mesh", "names"),
    [((3, 2), ("dp", "tp")), ((2, 3), ("tp", "dp")), ((2, 2, 2), ("rep", "dp", "tp")), ((8, 2), ("dp", "tp"))],
)
def test_the_boxes_are_those_of_this_torch(mesh: tuple[int, ...], names: tuple[str, ...], size: int) -> None:
    whole = torch.arange(2.0 * size).view(size, 2)
    world_size = int(torch.tensor(mesh).prod())
    for rank in range(world_size):
        with rank_of(rank, world_size):
            devices = init_device_mesh("cpu", mesh, mesh_dim_names=names)
            layer = nn.Linear(2, size, bias=False)
            of_tp = whole.chunk(devices["tp"].size())[devices["tp"].get_local_rank()]
            layer.weight = nn.Parameter(
                DTensor.from_local(
                    of_tp, devices["tp"], [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
                )
            )
            fully_shard(layer, mesh=devices["rep", "dp"] if "rep" in names else devices["dp"])
            [part] = local_shards("weight", layer.weight)
            assert torch.equal(part.memory, cut(whole, part.offsets, part.memory.shape)), f"rank {rank}"


def test_memory_that_is_not_what_the_placement_says_is_refused_by_name() -> None:
    with rank_of(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        short = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)], run_check=False, shape=(6, 3), stride=(3, 1))
        with pytest.raises(
            ValueError, match=r"model\.w: the rank at \[1\] .* has \[2, 3\] in memory, .* \[3, 3\] at \[3, 0\]"
        ):
            list(local_shards("model.w", short))


@pytest.mark.parametrize(
    ("ranks", "dim"), [([1, 0], 0), ([[0, 1], [3, 2]], 1), ([[2, 3], [0, 1]], 0)], ids=["1-D", "inner", "outer"]
)
def test_a_shard_on_a_mesh_whose_ranks_do_not_ascend_is_refused_by_name(ranks: list[int], dim: int) -> None:
    world_size = torch.tensor(ranks).numel()
    with rank_of(world_size - 1, world_size):
        mesh = DeviceMesh("cpu", ranks)
        placements: list[Placement] = [Replicate()] * mesh.ndim
        copied = DTensor.from_local(torch.zeros(4, 3), mesh, placements, run_check=False)
        [part] = local_shards("copied", copied)
        assert part.offsets == (0, 0), "where each rank has all rows, their order does not matter"
        placements[dim] = Shard(0)
        split = DTensor.from_local(torch.zeros(2, 3), mesh, placements, run_check=False)
        with pytest.raises(ValueError, match=rf"model\.w: this rank is number 0 of dimension {dim} of its .* number 1"):
            list(local_shards("model.w", split))


def test_a_rank_without_elements_may_have_empty_memory_of_any_shape() -> None:
    with rank_of(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        none = DTensor.from_local(torch.zeros(0), mesh, [Shard(0)], run_check=False, shape=(1, 3), stride=(3, 1))
        [part] = local_shards("w", none)
        assert (part.offsets, part.memory.shape) == ((1, 0), (0, 3))


def test_placements_whose_shards_are_not_boxes_are_refused() -> None:
    with pytest.raises(ValueError, match="rows that are not contiguous"):
        box_of((8,), (2,), [_StridedShard(0, split_factor=2)], (0,))
    with pytest.raises(ValueError, match="still to be reduced"):
        box_of((8,), (2,), [Partial()], (0,))
