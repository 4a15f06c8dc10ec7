"""Optimizers whose state under FSDP could not be loaded again: refused by name, and never loaded in part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from tests.checkpoint.only_once import save_and_close
from tests.checkpoint.small_run import job_config
from tests.checkpoint.state.fsdp1 import fsdp1
from tests.checkpoint.state.optimizers_of_torch import Regression, train_step
from tests.ranks import Ranks, on_two_ranks
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.errors import CheckpointMismatch, ConfigError


def lbfgs(model: nn.Module) -> Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=3)


def manager_of(folder: Path, model: nn.Module, *optimizers: Optimizer, **options: Any) -> CheckpointManager:
    return CheckpointManager(None, model, optimizers, None, {}, job_config(folder, **options))


def sharded() -> nn.Module:
    torch.manual_seed(0)
    model = Regression().requires_grad_(True)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


@on_two_ranks
def test_state_in_lists_is_refused_at_the_save_under_fsdp2(rank: int, tmp_path: Path) -> None:
    model = sharded()
    optimizer = lbfgs(model)
    for step in (1, 2):
        train_step(model, optimizer, step, late=True)
    refusal = r"optimizer\.state\.first\.weight\.\w+ is a list.*fully_shard"
    with manager_of(tmp_path, model, optimizer) as manager, pytest.raises(ConfigError, match=refusal):
        manager.save(2, force=True)


class Factored(torch.optim.SGD):
    """Keeps a complete matrix in a dict, on each rank, as SOAP and Shampoo of some libraries do."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["factors"] = {"left": torch.eye(11), "num": torch.ones(())}
        return super().step(closure)


@on_two_ranks
def test_plain_tensors_in_dicts_are_refused_at_the_save_under_fsdp2_as_a_load_would(rank: int, tmp_path: Path) -> None:
    model = sharded()
    optimizer = Factored(model.parameters(), lr=0.1)
    train_step(model, optimizer, 1, late=True)
    refusal = r"optimizer\.state\.first\.weight\.factors is a dict with tensors in it, which a load would refuse"
    with manager_of(tmp_path, model, optimizer) as manager, pytest.raises(ConfigError, match=refusal):
        manager.save(1, force=True)


def load_sharded(rank: int, folder: Path) -> None:
    model = sharded()
    before = [each.to_local().clone() for each in model.parameters()]  # type: ignore[operator]  # DTensors
    manager = manager_of(folder, model, lbfgs(model), load_only=True)
    refusal = r"first\.weight\.old_dirs is a list (.|\n)*exclude_from_loading=optimizer"
    with manager, pytest.raises(CheckpointMismatch, match=refusal):
        manager.load()
    now = [each.to_local() for each in model.parameters()]  # type: ignore[operator]  # DTensors
    assert all(map(torch.equal, before, now))


def test_state_in_lists_is_refused_at_the_load_under_fsdp2(tmp_path: Path, two_ranks: Ranks) -> None:
    torch.manual_seed(0)
    model = Regression().requires_grad_(True)
    optimizer = lbfgs(model)
    for step in (1, 2):
        train_step(model, optimizer, step, late=True)
    save_and_close(manager_of(tmp_path, model, optimizer), 2)
    two_ranks.run(load_sharded, folder=tmp_path)


@on_two_ranks
def test_two_optimizers_for_one_module_under_fsdp1_are_refused_at_the_first_save(rank: int, tmp_path: Path) -> None:
    model = fsdp1(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    first, *others = model.parameters()
    optimizers = torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    with manager_of(tmp_path, model, *optimizers) as manager, pytest.raises(ConfigError, match=r"SGD.*fully_shard"):
        manager.save(1, force=True)


class WithEmpty(nn.Module):
    """A parameter without elements next to one with elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y + self.empty.sum()


@on_two_ranks
def test_a_parameter_without_elements_under_fsdp1_is_refused_at_the_first_save(rank: int, tmp_path: Path) -> None:
    """FSDP1 drops a part of its state at a load, and the optimizer then raises on one rank."""
    model = fsdp1(WithEmpty())
    optimizer = torch.optim.RMSprop(model.parameters(), momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with (
        manager_of(tmp_path, model, optimizer) as manager,
        pytest.raises(ConfigError, match="empty"),
    ):
        manager.save(1, force=True)


@on_two_ranks
def test_state_of_a_parameter_in_another_memory_order_is_refused_under_fsdp1(rank: int, tmp_path: Path) -> None:
    model = fsdp1(nn.Sequential(nn.Conv2d(2, 2, 3)).to(memory_format=torch.channels_last))  # type: ignore[call-overload]  # torch's stub lacks it
    adam = torch.optim.Adam(model.parameters())
    model(torch.randn(1, 2, 4, 4)).sum().backward()
    adam.step()
    refusal = r"optimizer\.state\.0\.weight: .*channels_last.* contiguous"
    with manager_of(tmp_path / "adam", model, adam) as manager, pytest.raises(ConfigError, match=refusal):
        manager.save(1, force=True)
    with manager_of(tmp_path / "sgd", model, torch.optim.SGD(model.parameters())) as manager:
        assert manager.save(1, force=True)
