"""How many collectives a rank has begun, by group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import on_two_ranks
from torchtitan_lite.distributed.groups import counts_of


@on_two_ranks
def test_each_collective_counts_in_its_group_and_that_of_a_pipeline_does_not(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp_shard"))
    count = counts_of(mesh)
    before = count()
    assert before.keys() == {"all ranks", "dp_shard from rank 0"}
    for _ in range(3):
        dist.all_reduce(torch.zeros(1), group=mesh.get_group("dp_shard"))
    dist.barrier()
    after = count()
    # Torch may have one group for all ranks and for a dimension with all of them.
    assert after["dp_shard from rank 0"] - before["dp_shard from rank 0"] in (3, 4)
    assert after["all ranks"] - before["all ranks"] in (1, 4)


@on_two_ranks
def test_ranks_of_different_groups_name_them_differently(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_shard", "tp"))
    assert counts_of(mesh)().keys() == {"all ranks", "dp_shard from rank 0", f"tp from rank {rank}"}
