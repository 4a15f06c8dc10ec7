"""The wrappers of torchtitan of November 2024 load model, optimizer and schedule of a full checkpoint of ours."""

from __future__ import annotations

import functools
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import load as dcp_load

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.reading import wrappers_of_2024
from tests.checkpoint.small_run import SmallRun, Tiny, same


class Theirs:
    """A fresh run with the objects of torchtitan of November 2024."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = Tiny()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        # torchtitan's factor was a functools.partial; this one has the same numbers as small_run's.
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, functools.partial(_falling, 1))
        self.states = {
            "model": wrappers_of_2024.Model(self.model),
            "optimizer": wrappers_of_2024.Optimizer(self.model, self.optimizer),
            "lr_scheduler": self.scheduler,
        }

    def moments(self) -> list[dict[str, Any]]:
        return list(self.optimizer.state_dict()["state"].values())


def load(states: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp_load(states, checkpoint_id=path, no_dist=True)


def _falling(first: int, done: int) -> float:
    return 1 / (first + done)


@pytest.fixture
def saved(start_run: StartRun) -> SmallRun:
    """Return a run that was saved at step 4."""
    run = start_run().loaded()
    run.train(4)
    return run


def test_model_optimizer_and_schedule_are_loaded_and_the_run_continues_as_ours(saved: SmallRun) -> None:
    theirs = Theirs()
    load(theirs.states, saved.root / "step-4")
    assert same(dict(theirs.model.state_dict()), saved.contents()["model"])
    assert same(theirs.moments(), saved.contents()["moments"])
    assert theirs.scheduler.last_epoch == 4
    assert theirs.scheduler.get_last_lr() == saved.scheduler.get_last_lr()
    batch = next(saved.loader)
    for model, optimizer, scheduler in (
        (theirs.model, theirs.optimizer, theirs.scheduler),
        (saved.model, saved.optimizer, saved.scheduler),
    ):
        model(batch).square().mean().backward()
        optimizer.step()
        scheduler.step()
    assert same(dict(theirs.model.state_dict()), dict(saved.model.state_dict()))
    assert theirs.scheduler.get_last_lr() == saved.scheduler.get_last_lr()


def test_of_the_train_state_only_the_step_is_loaded(saved: SmallRun) -> None:
    path = saved.root / "step-4"
    step = {"train_state": {"step": torch.tensor(0, dtype=torch.int32)}}
    load(step, path)
    assert step["train_state"]["step"] == 4
    with pytest.raises(CheckpointException, match="expected BytesStorageMetadata"):
        load({"train_state": {"log_steps": io.BytesIO()}}, path)
