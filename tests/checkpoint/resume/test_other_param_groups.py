"""A load into a model or an optimizer that is not built like the one that was saved says how to make it fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.only_once import load_and_close
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.errors import CheckpointMismatch


class Phases:
    """A loop that trains the first layer, and from `add` on the second one, too."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        self.optimizer = torch.optim.AdamW(self.model[0].parameters(), lr=0.1)
        self.manager = CheckpointManager.for_loop(
            model=self.model, optimizer=self.optimizer, folder=folder, interval=1, preemption_signals=()
        )

    def add(self) -> None:
        self.optimizer.add_param_group({"params": list(self.model[1].parameters()), "lr": 0.01})

    def step(self, number: int) -> None:
        self.model(torch.rand(4, 2)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.manager.save(number)


def test_a_group_that_was_saved_and_is_not_here_is_to_be_added_before_the_load(tmp_path: Path) -> None:
    run = Phases(tmp_path)
    with run.manager:
        run.add()
        run.step(1)
    again = Phases(tmp_path)
    with again.manager:
        with pytest.raises(CheckpointMismatch, match=r"1[.]weight, 1[.]bias .*add_param_group.* before load"):
            again.manager.load()
        again.add()
        assert again.manager.load()
        again.step(2)


def test_a_group_that_is_here_and_was_not_saved_is_to_be_added_after_the_load(tmp_path: Path) -> None:
    run = Phases(tmp_path)
    with run.manager:
        run.step(1)
    again = Phases(tmp_path)
    again.add()
    with again.manager, pytest.raises(CheckpointMismatch, match=r"1[.]weight, 1[.]bias .*add_param_group.* after load"):
        again.manager.load()
    third = Phases(tmp_path)
    with third.manager:
        assert third.manager.load()
        third.add()
        third.step(2)


def test_a_model_that_has_other_layers_gets_no_advice_about_groups(tmp_path: Path) -> None:
    run = Phases(tmp_path)
    with run.manager:
        run.add()
        run.step(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with (
        CheckpointManager.for_loop(model=model, optimizer=optimizer, folder=tmp_path, preemption_signals=()) as manager,
        pytest.raises(CheckpointMismatch) as refused,
    ):
        manager.load()
    assert "add_param_group" not in str(refused.value)


def test_another_output_layer_is_refused_with_what_loads_all_others(tmp_path: Path) -> None:
    with _made(tmp_path, _layers(3)) as manager:
        manager.save(1)
    refused = "--checkpoint.load_exclude=1.weight,1.bias"
    with _made(tmp_path, _layers(4)) as manager, pytest.raises(CheckpointMismatch, match=refused):
        manager.load()
    load_and_close(_made(tmp_path, _layers(4), load_exclude=["1.weight", "1.bias"]))


def test_another_optimizer_is_refused_with_what_begins_it_fresh(tmp_path: Path) -> None:
    with _made(tmp_path, _layers(3)) as manager:
        manager.save(1)
    fresh = ["optimizer", "lr_scheduler"]
    refused = f"--checkpoint.exclude_from_loading={','.join(fresh)}"
    with _made(tmp_path, _layers(3), torch.optim.SGD) as manager, pytest.raises(CheckpointMismatch, match=refused):
        manager.load()
    load_and_close(_made(tmp_path, _layers(3), torch.optim.SGD, exclude_from_loading=fresh))


def test_another_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with _made(tmp_path, _layers(3)) as manager:
        manager.save(1)
    wider, longer = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4)), nn.Sequential(*_layers(3), nn.Linear(3, 3))
    refused = "as when this was saved, or start a new run in another folder"
    for model in (wider, longer):
        with _made(tmp_path, model) as manager, pytest.raises(CheckpointMismatch, match=refused):
            manager.load()


def _layers(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, outputs))


def _made(
    folder: Path, model: nn.Module, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **keys: Any
) -> CheckpointManager:
    made = optimizer(model.parameters(), lr=0.1)
    return CheckpointManager.for_loop(
        model=model, optimizer=made, folder=folder, interval=1, preemption_signals=(), **keys
    )
