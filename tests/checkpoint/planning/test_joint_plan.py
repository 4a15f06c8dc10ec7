"""The plan of all ranks by arithmetic is as good as the one that DCP makes item by item."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from tests.checkpoint.planning.simulated import Has, JointlyPlanned, plan_of, planned
from tests.examples import examples
from torchtitan_lite.checkpoint.format.chunk_runs import chunk_mismatch
from torchtitan_lite.checkpoint.format.contents import StoredTensor
from torchtitan_lite.checkpoint.format.dtypes import DTYPES
from torchtitan_lite.checkpoint.format.file_data import FileLayout
from torchtitan_lite.checkpoint.format.flattening import flatten
from torchtitan_lite.checkpoint.format.tensor_table import TensorTable
from torchtitan_lite.checkpoint.planning.joint_plan import JointPlan
from torchtitan_lite.checkpoint.planning.rank_summary import MeshPlace, PlanEntry, outlined
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import Table


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


SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 12, 13, 16])


def coordinate_of(rank: int, mesh: Sequence[int]) -> tuple[int, ...]:
    found = []
    for size in reversed(mesh):
        rank, place = divmod(rank, size)
        found.append(place)
    return tuple(reversed(found))


@st.composite
def placements(draw: st.DrawFn, mesh: Sequence[int], num_dims: int) -> tuple[Placement, ...]:
    """How a tensor lies on `mesh`; also as FSDP cuts what tensor parallelism has left."""
    found: list[Placement] = []
    for _ in mesh:
        dim = draw(st.integers(-1, num_dims - 1))
        found.append(Replicate() if dim < 0 else Shard(dim))
    if len(mesh) == 2 and num_dims and draw(st.booleans()) and isinstance(found[1], Shard):
        found[0] = _StridedShard(found[1].dim, split_factor=mesh[1])
    return tuple(found)


@st.composite
def worlds(draw: st.DrawFn) -> list[list[Has]]:
    """What each rank of a job has."""
    stages = draw(st.integers(1, 3))
    mesh = draw(st.sampled_from([(1,), (2,), (3,), (8,), (2, 2), (2, 3), (3, 2), (4, 2), (2, 2, 2), (1, 5)]))
    num_ranks = stages * math.prod(mesh)
    ranks: list[list[Has]] = [[] for _ in range(num_ranks)]
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(SIZES, max_size=3)))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
        kind = draw(st.sampled_from(["sharded", "sharded", "part of the mesh", "whole", "lowest", "own", "object"]))
        # A stage has names of its own, or they have one in common.
        stage = draw(st.sampled_from([None, *range(stages)]))
        how = draw(placements(mesh, len(shape)))
        # As with FSDP on ranks of tensor parallelism that all have the same norm.
        part = draw(placements(mesh[:1], len(shape)))
        for rank in range(num_ranks):
            own_stage, place = divmod(rank, math.prod(mesh))
            if stage is not None and own_stage != stage:
                continue
            at = coordinate_of(place, mesh)
            key = f"{('model', 'optimizer')[number % 2]}.t{number}"
            if kind == "sharded":
                ranks[rank].append(Has(key, shape, dtype, MeshPlace(mesh, at), how))
            elif kind == "part of the mesh":
                ranks[rank].append(Has(key, shape, dtype, MeshPlace(mesh[:1], at[:1]), part))
            elif kind == "whole":
                ranks[rank].append(Has(key, shape, dtype))
            elif kind == "lowest":
                ranks[rank].append(Has(key, shape, dtype, is_lowest_ranks=True))
            elif kind == "own":
                ranks[rank].append(Has(f"rng.rank{rank}.t{number}", shape, dtype))
            else:
                ranks[rank].append(Has(f"{key}.object"))
    for of_rank in ranks:
        of_rank.sort(key=lambda has: has.key.partition(".")[0])
    return ranks


def boxes_of(plans: Sequence[Sequence[WriteItem]]) -> list[tuple[Any, ...]]:
    """Return what is written that has elements, and the names of all else, in order."""
    found: set[tuple[Any, ...]] = set()
    listed = []
    for items in plans:
        for item in items:
            data = item.tensor_data
            if data is None or not data.size.numel():
                found.add((item.index.fqn,))
            elif data.chunk.sizes.numel():
                listed.append((item.index.fqn, *data.chunk.offsets, *data.chunk.sizes))
    return sorted([*listed, *found], key=str)


def check_places(made: JointlyPlanned) -> None:
    """The table says for each part the file and the byte at which its rank writes it."""
    expected = {}
    for rank, items in enumerate(made.kept):
        of_tensors = [(item, item.tensor_data) for item in items if item.tensor_data is not None]
        places = FileLayout([(data.properties.dtype, tuple(data.chunk.sizes)) for _, data in of_tensors]).places
        for (item, data), place in zip(of_tensors, places, strict=True):
            expected[item.index.fqn, tuple(data.chunk.offsets)] = layout.data_file(rank, 0), place.data_at
    table = TensorTable.parse(Table(made.tensors), DTYPES)
    found = {(key, chunk.offsets): (chunk.file, chunk.at) for key, tensor in table.items() for chunk in tensor.chunks}
    assert found == expected
    for key, tensor in table.items():
        assert not chunk_mismatch(StoredTensor(tensor.dtype, tensor.shape, [*tensor.chunks])), key


def written_bytes(plans: Sequence[Sequence[WriteItem]]) -> list[int]:
    return [sum(map(num_bytes, items)) for items in plans]


@pytest.mark.promise(
    "A tensor that several ranks hold is written once, and the bytes are spread evenly.",
    section="state",
)
@pytest.mark.slow
@settings(max_examples=examples(1000), deadline=None)
@given(worlds())
def test_both_ways_write_each_element_once_and_no_file_is_much_larger(ranks: list[list[Has]]) -> None:
    made = planned(ranks)
    theirs, metadata = planned_by_dcp([plan_of(of_rank) for of_rank in ranks])
    assert boxes_of(made.kept) == boxes_of([plan.items for plan in theirs])
    check_places(made)
    largest = max((num_bytes(item) for items in made.kept for item in items), default=0)
    assert max(written_bytes(made.kept)) <= max(written_bytes([plan.items for plan in theirs])) + largest
    described: Metadata = pickle.loads(made.metadata)
    assert described.state_dict_metadata.keys() == metadata.state_dict_metadata.keys()
    for key, of_key in metadata.state_dict_metadata.items():
        if isinstance(of_key, TensorStorageMetadata):
            ours = described.state_dict_metadata[key]
            assert isinstance(ours, TensorStorageMetadata)
            assert (ours.size, ours.properties.dtype) == (of_key.size, of_key.properties.dtype)


@settings(max_examples=examples(200), deadline=None)
@given(worlds())
def test_ranks_that_share_a_part_are_compared_in_one_group_and_name_it_alike(ranks: list[list[Has]]) -> None:
    made = planned(ranks)
    plans = [plan_of(of_rank) for of_rank in ranks]
    holders: dict[Any, list[int]] = {}
    for rank, (plan, of_rank) in enumerate(zip(plans, ranks, strict=True)):
        for item, has in zip(plan.items, of_rank, strict=True):
            if num_bytes(item) and not has.is_lowest_ranks:
                holders.setdefault(item.index, []).append(rank)
    groups: dict[int, dict[int, Any]] = {}
    for rank, of_shared in enumerate(made.shared):
        for shared, numbers in of_shared:
            names = [plans[rank].items[number].index for number in numbers]
            groups.setdefault(shared.group, {})[rank] = names, shared.lowest, shared.previous, shared.next
    found = {}
    for group in groups.values():
        members = sorted(group)
        names = group[members[0]][0]
        for rank, before, after in zip(members, [None, *members], [*members[1:], None], strict=False):
            assert group[rank] == (names, members[0], before, after)
        found |= dict.fromkeys(names, members)
    assert found == {index: held for index, held in holders.items() if len(held) > 1}


def test_equal_parts_begin_at_the_same_byte_of_each_file_from_four_ranks_on() -> None:
    """Only rank 0 writes the number, which lies before them in the state."""
    for num_ranks, count in ((3, 2), (4, 1)):
        mesh = (num_ranks,)
        ranks = [
            [
                Has("model.a", (), is_lowest_ranks=True),
                Has("model.b", (8 * num_ranks,), mesh=MeshPlace(mesh, (rank,)), placements=(Shard(0),)),
            ]
            for rank in range(num_ranks)
        ]
        table = TensorTable.parse(Table(planned(ranks).tensors), DTYPES)
        assert len({chunk.at for chunk in table["model.b"].chunks}) == count


def test_a_group_of_thousands_is_described_by_a_run_and_said_in_as_many_bytes_as_a_small_one() -> None:
    sizes = {}
    for num_ranks in (8, 2048):
        ranks = [
            [Has("model.w", (4 * num_ranks, 3), mesh=MeshPlace((num_ranks,), (rank,)), placements=(Shard(0),))]
            for rank in range(num_ranks)
        ]
        made = planned(ranks)
        assert made.tensors["model.w"]["runs"] == [[num_ranks, [0, 1], 384, 0, [0, 0], [4, 3]]]
        sizes[num_ranks] = len(str(made.tensors))
    assert sizes[2048] - sizes[8] < 20


def test_parts_that_do_not_make_up_the_tensor_are_refused_by_name() -> None:
    half = Has("model.w", (4,), mesh=MeshPlace((2,), (0,)), placements=(Shard(0),))
    with pytest.raises(ValueError, match=r"model\.w: its chunks have 2 elements where there are 4"):
        planned([[half], []])
    with pytest.raises(ValueError, match=r"model\.w: its chunks overlap"):
        planned([[half], [Has("model.w", (4,))]])


def test_a_tensor_of_another_shape_than_the_lowest_ranks_is_named() -> None:
    made = planned([[Has("model.w", (4,))], [Has("model.w", (5,))]])
    assert made.contradiction == "model.w ([4] of torch.float32 on rank 0, [5] of torch.float32 on rank 1)"
    assert made.tensors["model.w"]["shape"] == [4]
    assert [len(items) for items in made.kept] == [1, 0]
    lowest = planned([[Has("model.w", (4,))], [Has("model.w", (5,), is_lowest_ranks=True)]])
    assert (lowest.contradiction, lowest.tensors["model.w"]["shape"]) == ("", [4])


def test_a_tensor_and_an_object_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"x\.y is a tensor on rank 0 and an object on rank 1"):
        planned([[Has("x.y", (4,))], [Has("x.y")]])


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 8), st.integers(0, 10))
def test_no_rank_has_much_more_than_its_share(sizes: list[int], num_ranks: int, num_own: int) -> None:
    shared = [Has(f"model.shared{i}", (size,), torch.int8) for i, size in enumerate(sizes)]
    ranks = [
        [*shared, *(Has(f"rng.own{rank}.{i}", (5,), torch.int8) for i in range(num_own))] for rank in range(num_ranks)
    ]
    loads = written_bytes(planned(ranks).kept)
    assert max(loads) - min(loads) <= max(sizes), "the last part went to the rank with the fewest bytes"


def test_one_byte_goes_to_the_holder_with_least_and_zero_bytes_to_the_first_holder() -> None:
    both = [Has("model.empty", (0,)), Has("model.byte", (1,), torch.int8)]
    made = planned([[*both, Has("rng.own", (9,))], both])
    assert [[item.index.fqn for item in items] for items in made.kept] == [["model.empty", "rng.own"], ["model.byte"]]


def test_all_that_is_shared_comes_from_the_lowest_rank_where_ranks_differ() -> None:
    ranks = [[Has("model.a", (4,)), Has("model.b", (4,))] for _ in range(3)]
    assert [len(items) for items in planned(ranks, of_lowest=True).kept] == [2, 0, 0]


def test_names_of_single_ranks_leave_the_others_one_piece() -> None:
    """As with experts that each rank has under its own number."""
    digests = set()
    for rank in range(3):
        keys = ["model.a", f"model.rank{rank}.w", "model.b"]
        own = outlined([PlanEntry(key, "float32", (2,)) for key in keys], [], flatten({"model": {}})[1])
        digests.add((own.outline.sections[0], own.outline.sections[2]))
    assert len(digests) == 1


def test_a_tensor_without_elements_is_stored_in_its_whole_shape_however_it_is_cut() -> None:
    ranks = [[Has("model.w", (0, 3), mesh=MeshPlace((2,), (rank,)), placements=(Shard(1),))] for rank in range(2)]
    made = planned(ranks)
    assert [chunk[2:] for chunk in made.tensors["model.w"]["chunks"]] == [[[0, 0], [0, 3]]]
    check_places(made)


def test_of_equal_ranks_only_the_first_sends_its_pieces() -> None:
    own = [outlined([PlanEntry("a.b")], [], flatten({"a": {"b": 0}})[1]) for _ in range(3)]
    first, *others = JointPlan().ask([each.outline for each in own])
    assert len(first) > 0
    assert others == [(), ()]


def test_four_tensors_that_contradict_the_lowest_rank_are_named_and_the_others_counted() -> None:
    ranks = [[Has(f"model.t{number}", (2 + rank,)) for number in range(6)] for rank in range(2)]
    contradiction = planned(ranks).contradiction
    assert [f"model.t{number}" in contradiction for number in range(6)] == [True] * 4 + [False] * 2
    assert contradiction.endswith(" and 2 more")


def test_a_list_that_differs_and_has_no_entry_counts_as_the_lowest_ranks() -> None:
    states = [{"a": {"b": 0, "seen": [{}] * length}} for length in (1, 2)]
    own = [outlined([PlanEntry("a.b")], [], flatten(state)[1]) for state in states]
    joint = JointPlan()
    asked = joint.ask([each.outline for each in own])
    joint.answers([each.of(wanted) for each, wanted in zip(own, asked, strict=True)])
    assert joint.odd_containers == {"a.seen": 0}
