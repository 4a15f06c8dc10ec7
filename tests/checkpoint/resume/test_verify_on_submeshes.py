"""The check after a load counts each shard once, though several meshes of the job hold it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.checkpoint.small_run import job_config
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.errors import CheckpointMismatch


def run_on(mesh: DeviceMesh, folder: Path) -> tuple[nn.Linear, CheckpointManager]:
    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    fully_shard(model, mesh=mesh)
    config = job_config(folder, digest_tensors=("save", "load"))
    return model, CheckpointManager(None, model, None, None, {}, config)


@on_two_ranks
def test_the_shards_of_two_meshes_are_verified(rank: int, tmp_path: Path) -> None:
    """As with layers that FSDP2 shards while tensor parallelism does not."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))["dp"]
    _, manager = run_on(mesh, tmp_path)
    with manager:
        manager.save(1, force=True)
        assert manager.load()


@on_two_ranks
def test_a_shard_that_was_not_loaded_on_one_of_two_meshes_is_found(rank: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))["dp"]
    model, manager = run_on(mesh, tmp_path)

    def spoil(*_: object) -> None:
        if rank == 1:
            with torch.no_grad():
                model.weight.add_(1)

    with manager:
        manager.save(1, force=True)
        model.register_load_state_dict_post_hook(spoil)
        with pytest.raises(CheckpointMismatch, match=r"model\.weight is not, after loading"):
            manager.load()
