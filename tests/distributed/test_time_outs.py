"""The time-out of collectives is long until the first step has been done, and short after it."""

from __future__ import annotations

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import on_two_ranks
from torchtitan_lite.config.job_config import Comm
from torchtitan_lite.distributed.process_group import shorten_timeouts
from torchtitan_lite.torch_private import set_timeout


@on_two_ranks
def test_all_groups_of_a_mesh_get_the_short_one_without_a_warning(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shorten_timeouts(mesh, Comm(train_timeout_seconds=60))
    dist.barrier()


@on_two_ranks
def test_a_collective_ends_after_the_time_that_was_set(rank: int) -> None:
    group = dist.new_group([0, 1], backend="gloo", timeout=timedelta(hours=1))
    set_timeout(group, timedelta(milliseconds=200))
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
