"""The place of this process among the ranks, simulated ones included."""

from __future__ import annotations

import torch

from torchtitan_lite.config.job_config import Comm
from torchtitan_lite.distributed.process_group import World, process_group


def test_of_simulated_ranks_this_process_is_the_first_on_any_machine() -> None:
    with process_group(Comm(simulated_ranks=12)) as world:
        assert world == World(0, 12, torch.device("cpu"), is_simulated=True)
        assert torch.distributed.get_world_size() == 12
    assert not torch.distributed.is_initialized()
