"""Which rank writes what: planned once, reused while no rank's state changes its structure, balanced."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.sharded_run import sharded_run
from tests.checkpoint.small_run import target
from tests.ranks import on_two_ranks
from torchtitan_lite import faults
from torchtitan_lite.checkpoint.planning.plan_cache import PlanCache
from torchtitan_lite.checkpoint.planning.replicated import Replicated
from torchtitan_lite.checkpoint.saving.savers import SyncSaver
from torchtitan_lite.checkpoint.state.stateful import ModelWrapper, OptimizerWrapper
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.store.store import CheckpointStore

PEERS = Peers(timedelta(seconds=60))


def state(**tensors: torch.Tensor) -> dict[str, Any]:
    return {"model": tensors, "loader": {"position": 1}}


def test_a_state_of_the_same_structure_is_saved_by_the_same_plan() -> None:
    plans = PlanCache(PEERS)
    first = plans.plan(state(w=torch.zeros(3)))
    second = plans.plan(state(w=torch.ones(3)))
    assert second.plan is first.plan
    assert second.file().data.tensors[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "other",
    [
        {"model": {"w": torch.zeros(4)}, "loader": {"position": 1}},
        {"model": {"w": torch.zeros(3, dtype=torch.int32)}, "loader": {"position": 1}},
        {"model": {"v": torch.zeros(3)}, "loader": {"position": 1}},
        {"model": {"w": torch.zeros(3)}, "loader": {"position": 1, "seen": 2}},
        {"model": {"w": torch.zeros(3)}, "loader.position": 1},
        {"model": {"w": torch.zeros(3)}, "loader": {"position": torch.zeros(1)}},
    ],
    ids=["shape", "dtype", "name", "one more", "path", "kind"],
)
def test_a_change_of_structure_makes_a_new_plan(other: dict[str, Any]) -> None:
    plans = PlanCache(PEERS)
    first = plans.plan(state(w=torch.zeros(3)))
    assert plans.plan(other).plan is not first.plan


def test_tensors_that_forward_may_change_are_volatile() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {
        "model": ModelWrapper(model).state_dict(),
        "optimizer": OptimizerWrapper([model], [optimizer]).state_dict(),
        "train_state": {"step": torch.tensor(1)},
    }
    state["optimizer"]["param_groups.0.weight.lr"] = torch.tensor(0.1)  # As with a captured graph.
    planned = PlanCache(PEERS).plan(state)
    keys = [part.key for part in planned.plan.parts]
    assert sorted(keys[number] for number in planned.file().data.volatile) == [
        *("model.1.num_batches_tracked", "model.1.running_mean", "model.1.running_var"),
        *("optimizer.param_groups.0.weight.lr", "train_state.step"),
    ]


def escaped_from_vmap() -> torch.Tensor:
    """A tensor of torch's own class without memory: functorch is done with it."""
    escaped: list[torch.Tensor] = []
    torch.func.vmap(lambda x: escaped.append(x) or x)(torch.zeros(2, 3))  # type: ignore[func-returns-value]  # for it
    return escaped[0]


each_unwritable = pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.empty(3, device="meta"), torch.empty(0, device="meta"), escaped_from_vmap()],
    ids=["sparse", "meta", "empty meta", "escaped from vmap"],
)


@each_unwritable
def test_a_tensor_that_cannot_be_written_as_it_lies_is_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(TypeError, match=r"model\.strange is a Tensor of layout"):
        PlanCache(PEERS).plan({"model": {"strange": tensor}})


def test_a_plan_that_fails_is_raised_and_not_kept() -> None:
    plans = PlanCache(PEERS)
    with pytest.raises(ValueError, match=r"two entries of the state are both called 'a\.b'"):
        plans.plan({"a": {"b": 1}, "a.b": 2})
    plans.plan(state(w=torch.zeros(3)))


@on_two_ranks
def test_a_change_on_one_rank_makes_a_new_plan_on_both(rank: int, tmp_path: Path) -> None:
    plans = PlanCache(Peers(timedelta(seconds=30)))
    mesh = init_device_mesh("cpu", (2,))
    sharded = {"w": distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])}
    first = plans.plan(sharded).plan
    assert plans.plan(sharded).plan is first
    assert plans.plan(sharded | ({"only.here": torch.zeros(2)} if rank == 1 else {})).plan is not first


@on_two_ranks
def test_replicated_tensors_are_written_once_and_evenly(rank: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = {f"t{i}": torch.full((1000 + i,), float(i)) for i in range(40)}
    replicated: dict[str, Any] = {
        name: distribute_tensor(tensor, mesh, [Replicate()]) for name, tensor in whole.items()
    }
    store = CheckpointStore(tmp_path / "checkpoint")
    peers = Peers(timedelta(seconds=30))
    saver = SyncSaver(peers, PlanCache(peers, Replicated(lambda: replicated)))
    pending = saver.save(replicated, target(store, 1))
    pending.durable.result()
    dist.barrier()
    sizes = [(store.get(1).path / f"__{r}_0.distcp").stat().st_size for r in (0, 1)]
    unique = sum(tensor.numel() * 4 for tensor in whole.values())
    assert max(sizes) / (sum(sizes) / 2) < 1.05
    assert sum(sizes) < unique * 1.3, "apart from the elements there are only the frames of torch.save"
    target_state: dict[str, Any] = {
        name: DTensor.from_local(torch.zeros_like(t), mesh, [Replicate()]) for name, t in whole.items()
    }
    dcp_load(target_state, checkpoint_id=store.get(1).path)
    assert all(torch.equal(target_state[name].to_local(), whole[name]) for name in whole)


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_run_plans_its_saves_once(start_run: StartRun, async_mode: str) -> None:
    run = start_run(interval=1, async_mode=async_mode)
    run.manager.reset()
    run.train(1, last=False)
    saver: Any = run.manager._saver
    first = saver._plans.plan(run.manager._run.full(0)).plan
    run.train(4)
    assert saver._plans.plan(run.manager._run.full(0)).plan is first
    assert run.committed() == [1, 2, 3, 4]


class Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@on_two_ranks
def test_a_plan_that_fails_in_a_way_that_does_not_travel_fails_on_both(rank: int, tmp_path: Path) -> None:
    """On the second rank an error that cannot be sent to other ranks."""
    errors = [Unpicklable(1, 2)] if rank == 1 else []

    def parameters() -> tuple[str, ...]:
        if errors:
            raise errors.pop()
        return ()

    plans = PlanCache(Peers(timedelta(seconds=30)), Replicated(parameters))
    with pytest.raises(Exception, match="1 and 2"):
        plans.plan({"w": torch.zeros(2)})
    plans.plan({"w": torch.zeros(2)})


@on_two_ranks
def test_saves_that_fail_leave_no_group_behind(rank: int, tmp_path: Path) -> None:
    run = sharded_run(tmp_path, interval=1, max_failed_saves=99)
    faults.install("ENOSPC@manifest:times=always", rank=rank)
    groups = set()
    with run.manager:
        for step in range(2, 8):
            run.train(step, last=False)
            groups.add(id(run.manager._peers.saves.group))
        faults.install("", rank=rank)
    assert len(groups) == 1


@each_unwritable
def test_a_tensor_that_cannot_be_written_is_refused_in_the_place_of_one_that_was_saved(tensor: torch.Tensor) -> None:
    plans = PlanCache(PEERS)
    plans.plan({"model": {"strange": torch.zeros(tensor.shape, dtype=tensor.dtype)}})
    with pytest.raises(TypeError, match=r"model\.strange is a Tensor of layout"):
        plans.plan({"model": {"strange": tensor}})


def test_a_plan_holds_for_parameters_views_and_empty_tensors_of_the_same_dtype_and_shape() -> None:
    plans = PlanCache(PEERS)
    first = plans.plan(state(w=torch.zeros(2, 3), e=torch.zeros(0, 2)))
    w = torch.arange(6.0).reshape(3, 2).T
    second = plans.plan(state(w=torch.nn.Parameter(w), e=torch.zeros(2, 0).T))
    image = second.file().data
    assert second.plan is first.plan
    assert not any(tensor.requires_grad for tensor in image.tensors)
    content = bytearray(image.num_bytes)
    image.fill(memoryview(content), 0, image.num_bytes)
    begin = image.layout.places[0].data_at
    assert torch.frombuffer(content[begin : begin + 24], dtype=torch.float32).tolist() == [0, 2, 4, 1, 3, 5]
