"""Ranks that do not exist, for a dry run: one process acts as rank 0 of many.

torch's fake process group carries no data: a mesh over it has all ranks, and modules are sharded over it as they would
be, but whatever a collective returns is arbitrary. So nothing may depend on a result of one: checkpoint code agrees
through `OnlyRank`, and a dry run computes nothing.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it as exported

from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.torch_private import register_fake_backend


def init_simulated_ranks(num_ranks: int) -> None:
    """Open a default process group in which this process is rank 0 of `num_ranks`."""
    register_fake_backend()
    dist.init_process_group(backend="fake", rank=0, world_size=num_ranks, store=HashStore())


class OnlyRank(Peers):
    """The only rank that agrees on anything, although the default process group has more."""

    @property
    def rank(self) -> int:
        """Return 0."""
        return 0

    @property
    def world_size(self) -> int:
        """Return 1."""
        return 1


def build_peers(config: JobConfig, *, simulated: bool) -> Peers:
    """Return how the ranks of this job agree, within `checkpoint.timeout_seconds`."""
    timeout = timedelta(seconds=config.checkpoint.timeout_seconds)
    return OnlyRank(timeout) if simulated else Peers(timeout)
