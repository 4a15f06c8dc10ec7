"""Incremental saves of several ranks: each shares its own file, and a tensor moves on all of them together."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.checkpoint.frozen_run import Frozen, FrozenRun
from tests.ranks import Ranks, on_two_ranks
from torchtitan_lite.store import layout
from torchtitan_lite.store.store import CheckpointStore

FILES = [layout.data_file(rank, layout.STILL) for rank in range(4)]


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded() -> Frozen:
    model = Frozen()
    fully_shard(model, mesh=mesh())
    return model


def weights(run: FrozenRun) -> dict[str, Tensor]:
    """Return the complete weights. **Collective** for a sharded model."""
    state = run.model.state_dict()
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in state.items()}


def train(rank: int, folder: Path, mode: str, steps: int) -> dict[str, Tensor]:
    with FrozenRun(folder, model=sharded(), async_mode=mode) as run:
        run.manager.load()
        run.steps(steps)
        return weights(run)


@pytest.mark.parametrize("mode", ["disabled", "async_with_pinned_mem"])
def test_each_rank_shares_its_file_and_one_process_loads_what_they_saved(
    two_ranks: Ranks, tmp_path: Path, mode: str
) -> None:
    trained, _ = two_ranks.run(train, folder=tmp_path, mode=mode, steps=3)
    run = FrozenRun(tmp_path)
    assert all(run.shares(1, 3, file) for file in FILES[:2])
    with run:
        assert run.manager.load()
        assert all(torch.equal(trained[name], tensor) for name, tensor in run.model.state_dict().items())


def test_four_ranks_name_their_files_in_runs(four_ranks: Ranks, tmp_path: Path) -> None:
    trained, *_ = four_ranks.run(train, folder=tmp_path, mode="disabled", steps=2)
    run = FrozenRun(tmp_path)
    assert all(run.shares(1, 2, file) for file in FILES)
    [of_weight] = run.manifest(2).tensors["model.frozen.0.weight"]["runs"]
    assert of_weight[:2] == [4, [0, 1, 1]]
    with run:
        assert run.manager.load()
        assert all(torch.equal(trained[name], tensor) for name, tensor in run.model.state_dict().items())


@on_two_ranks
def test_a_shard_that_changes_on_one_rank_moves_the_tensor_on_all(rank: int, tmp_path: Path) -> None:
    with FrozenRun(tmp_path, model=sharded()) as run:
        run.manager.load()
        run.steps(2)
        if rank == 1:
            weight = run.model.get_parameter("frozen.0.weight")
            assert isinstance(weight, DTensor)
            with torch.no_grad():
                weight.to_local()[0] += 1
        run.steps(2)
        wanted = weights(run)
        if rank == 0:
            assert run.shares(2, 3, FILES[0])
            assert not run.shares(2, 3, FILES[1])
            chunks = run.manifest(4).tensors["model.frozen.0.weight"]["chunks"]
            assert [chunk[0] for chunk in chunks] == [layout.data_file(0, 0), layout.data_file(1, 0)]
    with FrozenRun(tmp_path, model=sharded()) as again:
        again.manager.load()
        found = weights(again)
        assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    if rank == 0:
        assert len(CheckpointStore(again.root).committed()) == 4
