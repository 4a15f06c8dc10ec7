"""An optimizer that a load turns into another one is named; settings that a run may change are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.small_run import job_config
from tests.logged import logged_warnings
from torchtitan_lite.checkpoint.manager import CheckpointManager

SGD, ADAM, ADAMW, NADAM = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam


def warnings_of(folder: Path, before: Any, now: Any) -> list[str]:
    """Return the warnings of a load with the optimizer `now`, from a checkpoint with `before`: (class, settings)."""
    with logged_warnings() as warnings:
        for build, settings in (before, now):
            model = nn.Linear(2, 2)
            optimizer = build(model.parameters(), **settings)
            with CheckpointManager(None, model, optimizer, None, None, job_config(folder)) as manager:
                if not manager.load():
                    model(torch.ones(1, 2)).sum().backward()
                    optimizer.step()
                    manager.save(1, force=True)
    return warnings


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ((ADAM, {}), (ADAMW, {}), "decoupled_weight_decay = True, and continues with False"),
        ((ADAMW, {}), (ADAM, {}), "decoupled_weight_decay = False, and continues with True"),
        ((ADAM, {"amsgrad": True}), (ADAM, {}), "amsgrad = False, and continues with True"),
        ((SGD, {"lr": 0.1}), (SGD, {"lr": 0.1, "maximize": True}), "maximize = True, and continues with False"),
        (
            (SGD, {"lr": 0.1, "momentum": 0.9}),
            (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
            "nesterov = True, and continues with False",
        ),
        ((NADAM, {}), (NADAM, {"decoupled_weight_decay": True}), "decoupled_weight_decay = True"),
    ],
    ids=["adam-adamw", "adamw-adam", "amsgrad", "maximize", "nesterov", "nadam"],
)
def test_an_optimizer_that_becomes_another_one_is_named(before: Any, now: Any, named: str, tmp_path: Path) -> None:
    (line,) = warnings_of(tmp_path, before, now)
    assert f"The optimizer of weight has {named}" in line and "exclude_from_loading=optimizer" in line


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ((ADAMW, {}), (ADAMW, {})),
        ((ADAMW, {}), (ADAMW, {"lr": 0.5, "betas": (0.8, 0.9), "weight_decay": 0.3, "eps": 1e-4})),
        ((ADAMW, {"foreach": True}), (ADAMW, {"fused": True})),
        ((SGD, {"lr": 0.1, "momentum": 0.9}), (SGD, {"lr": 0.2, "momentum": 0.8})),
    ],
    ids=["same", "figures", "implementation", "momentum"],
)
def test_other_figures_and_implementations_have_no_line(before: Any, now: Any, tmp_path: Path) -> None:
    assert not warnings_of(tmp_path, before, now)
