"""A copy of the state that training can no longer change."""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.planner import WriteItem

from torchtitan_lite.checkpoint.staging import PAGE, ArenaSlice, SnapshotPlanner, Stager, StagingArena, tensor_in

DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


@pytest.fixture
def stager() -> Iterator[Stager]:
    stager = Stager(pin=False)
    yield stager
    stager.close()


def staged(state: dict[str, Any], stager: Stager) -> SnapshotPlanner:
    planner = SnapshotPlanner()
    planner.take(state, stager)
    return planner


def contents(planner: SnapshotPlanner) -> dict[str, Any]:
    """What a writer would be given, by name."""
    items = planner.create_local_plan().items
    resolved = {item.index.fqn: planner.resolve_data(item) for item in items}
    return {name: load(data) if isinstance(data, io.BytesIO) else data for name, data in resolved.items()}


def load(data: io.BytesIO) -> Any:
    return torch.load(data, weights_only=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (3, 5), (40, 50)], ids=str)
def test_a_tensor_is_copied_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...], stager: Stager) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    copy = contents(staged({"t": tensor}, stager))["t"]
    assert (copy.dtype, copy.shape) == (dtype, tensor.shape)
    assert copy.contiguous().flatten().view(torch.uint8).tolist() == tensor.flatten().view(torch.uint8).tolist()


def test_views_are_copied_as_what_they_show(stager: Stager) -> None:
    base = torch.arange(12.0).view(3, 4)
    state = {"transposed": base.T, "column": base[:, 1], "expanded": torch.ones(1).expand(5), "leaf": base.clone()}
    state["leaf"].requires_grad_()
    copies = contents(staged(state, stager))
    assert all(torch.equal(copies[name], tensor) for name, tensor in state.items())
    assert not copies["leaf"].requires_grad


def test_what_changes_afterwards_does_not_change_the_copy(stager: Stager) -> None:
    live: dict[str, Any] = {"tensor": torch.zeros(3), "loader": {"position": 1, "seen": [1]}}
    planner = staged(live, stager)
    live["tensor"].fill_(9)
    live["loader"]["position"] = 2
    live["loader"]["seen"].append(2)
    copies = contents(planner)
    assert copies["tensor"].tolist() == [0, 0, 0]
    assert (copies["loader.position"], copies["loader.seen"]) == (1, [1])


def test_the_arena_is_kept_from_save_to_save_and_grows_when_it_must(stager: Stager) -> None:
    staged({"t": torch.zeros(1000)}, stager)
    arena = stager.arena
    staged({"t": torch.ones(900)}, stager)
    assert stager.arena is arena
    assert contents(staged({"t": torch.ones(2000)}, stager))["t"].sum() == 2000
    assert stager.arena is not arena
    assert arena.fd == -1


def test_tensors_do_not_overlap_and_large_ones_start_on_pages(stager: Stager) -> None:
    state = {f"t{i}": torch.full((size,), i, dtype=torch.uint8) for i, size in enumerate([1, PAGE, 3, 2 * PAGE + 1, 7])}
    copies = contents(staged(state, stager))
    assert all(torch.equal(copies[name], state[name]) for name in state)
    offsets = {name: stager.arena.place_of(copy).offset_bytes for name, copy in copies.items()}
    assert all(offsets[name] % PAGE == 0 for name in ("t1", "t3"))


def test_another_mapping_of_the_arena_sees_the_tensors(stager: Stager) -> None:
    """As the writer process has it."""
    state = {"a": torch.rand(7), "b": torch.rand(3000)}
    copies = contents(staged(state, stager))
    descriptor = os.dup(stager.arena.fd)
    elsewhere = mmap.mmap(descriptor, stager.arena.num_bytes)
    os.close(descriptor)
    for name, tensor in state.items():
        assert torch.equal(tensor_in(elsewhere, stager.arena.place_of(copies[name])), tensor)


def test_a_tensor_of_an_arena_brings_nothing_of_its_neighbours_along() -> None:
    arena = StagingArena(4096, pin=False)
    tensor = arena.tensor(ArenaSlice(64, (4,), torch.float32))
    assert tensor.untyped_storage().nbytes() == 16
    arena.close()
    arena.close()


def test_what_cannot_be_staged_is_told_where_all_ranks_learn_of_it(stager: Stager) -> None:
    planner = staged({"bad": {"lambda": lambda: None}}, stager)
    with pytest.raises(Exception, match=r"(?i)pickle"):
        planner.create_local_plan()


def test_a_planner_asked_for_what_it_did_not_stage_has_nothing(stager: Stager) -> None:
    one, other = staged({"a": torch.ones(1)}, stager), Stager(pin=False)
    item: WriteItem = staged({"b": torch.ones(1)}, other).create_local_plan().items[0]
    with pytest.raises(KeyError):
        one.resolve_data(item)
    other.close()
