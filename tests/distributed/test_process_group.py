"""The place of this process among the ranks, simulated ones included."""

from __future__ import annotations

import os

import pytest
import torch

from torchtitan_lite.config.job_config import Comm
from torchtitan_lite.distributed.process_group import World, process_group


def test_of_simulated_ranks_this_process_is_the_first_on_any_machine() -> None:
    with process_group(Comm(simulated_ranks=12)) as world:
        assert world == World(0, 12, torch.device("cpu"), is_simulated=True)
        assert torch.distributed.get_world_size() == 12
    assert not torch.distributed.is_initialized()


def test_a_deterministic_job_sets_what_cublas_needs_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    try:
        with process_group(Comm(simulated_ranks=2), deterministic=True):
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
            assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
