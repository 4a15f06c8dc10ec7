"""Buffers that get their shape in training come back, if their module loads them in any shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoint.only_once import load_and_close
from tests.checkpoint.small_run import job_config, same
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.errors import CheckpointMismatch


class Observer(nn.Module):
    """Like the observers of quantization: the extremes of each channel, empty before the first batch."""

    lowest: Tensor
    highest: Tensor

    def __init__(self, takes: bool = True) -> None:
        super().__init__()
        self.takes = takes
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("lowest", torch.zeros(0))
        self.register_buffer("highest", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            is_first = self.lowest.numel() == 0
            self.lowest = x.amin(0) if is_first else torch.minimum(self.lowest, x.amin(0))
            self.highest = x.amax(0) if is_first else torch.maximum(self.highest, x.amax(0))
        return self.scale * (x - self.lowest) / (self.highest - self.lowest)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("lowest", "highest") if self.takes else ():
            if f"{prefix}{name}" in state_dict:
                setattr(self, name, torch.empty_like(state_dict[f"{prefix}{name}"]))
        super()._load_from_state_dict(state_dict, prefix, *args)


def run(folder: Path, takes: bool = True, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, CheckpointManager]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Observer(takes), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, CheckpointManager(None, model, optimizer, None, {}, job_config(folder, **options))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.rand(4, 3, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()


def test_a_run_with_an_observer_continues_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    model, optimizer, manager = run(tmp_path, digest_tensors=("save",))
    with manager:
        train(model, optimizer, range(1, 4))
        manager.save(3, force=True)
        train(model, optimizer, range(4, 7))
    again, other, manager = run(tmp_path, digest_tensors=("load",))
    load_and_close(manager)
    assert again[1].lowest.shape == (3,)
    train(again, other, range(4, 7))
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    assert same(other.state_dict(), optimizer.state_dict())


def test_a_buffer_that_its_module_does_not_take_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model, optimizer, manager = run(tmp_path, takes=False)
    with manager:
        train(model, optimizer, range(1, 4))
        manager.save(3, force=True)
    again, _, manager = run(tmp_path, takes=False)
    before = {name: each.clone() for name, each in again.state_dict().items()}
    with (
        manager,
        pytest.raises(CheckpointMismatch, match=r"1\.lowest: shape \[3\] in the checkpoint, \[0\] expected"),
    ):
        manager.load()
    assert same(dict(again.state_dict()), before)
