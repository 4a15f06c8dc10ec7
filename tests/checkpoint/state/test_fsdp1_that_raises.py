"""What raises while FSDP1 makes its state dict is refused by name, and the model stays usable."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.small_run import job_config
from tests.checkpoint.state.fsdp1 import fsdp1
from tests.checkpoint.state.odd_objects import FusedQkv
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.state.fsdp1 import sharded_state_dicts
from torchtitan_lite.errors import ConfigError, SaveFailed


def manager_of(folder: Path, model: nn.Module, **options: Any) -> CheckpointManager:
    return CheckpointManager(None, model, None, None, {}, job_config(folder, **options))


@pytest.mark.parametrize("mode", ["disabled", "async"])
@on_two_ranks
def test_a_hook_that_renames_parameters_is_refused_by_name_at_each_save(rank: int, tmp_path: Path, mode: str) -> None:
    model = fsdp1(nn.Sequential(nn.Linear(4, 4), FusedQkv()))
    with manager_of(tmp_path, model, interval=2, async_mode=mode) as manager:
        assert not manager.save(1)  # An asynchronous mode already reads the state here, to prepare.
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"model: 1\.weight is not in the state dict .*fully_shard"):
                manager.save(2)


@on_two_ranks
def test_a_hook_that_raises_leaves_the_parameters_sharded(rank: int, tmp_path: Path) -> None:
    model = fsdp1(nn.Sequential(fsdp1(nn.Linear(4, 4)), nn.Linear(4, 4)))
    raising = [True]

    def hook(*_: Any) -> None:
        if raising:
            raise OSError("the hook's own")

    model.get_submodule("0")._fsdp_wrapped_module.register_state_dict_post_hook(hook)
    model(torch.ones(2, 4))
    before = [each.clone() for each in model.parameters()]
    with manager_of(tmp_path, model) as manager:
        with pytest.raises(SaveFailed, match="OSError: the hook's own"):
            manager.save(1, force=True)
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        model(torch.ones(2, 4)).sum().backward()
        raising.clear()
        assert manager.save(2, force=True)


@on_two_ranks
def test_warnings_are_shown_again_after_a_state_dict(rank: int) -> None:
    model = fsdp1(nn.Linear(4, 4))
    before = [*warnings.filters]
    with sharded_state_dicts(model):
        assert model.state_dict()["weight"].shape == (4, 4)
    assert warnings.filters == before
