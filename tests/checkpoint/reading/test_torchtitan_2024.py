"""The wrappers of torchtitan of November 2024 load a full checkpoint of ours: parts as it is, all after conversion."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import load as dcp_load

from scripts.for_torchtitan_2024 import convert
from tests.checkpoint.conftest import StartRun
from tests.checkpoint.reading import wrappers_of_2024
from tests.checkpoint.reading.damage import flip
from tests.checkpoint.small_run import SmallRun, Tiny, same
from torchtitan_lite.disk.block_reader import DamagedRange


class Theirs:
    """A fresh run with the objects of torchtitan of November 2024."""

    def __init__(self, *, dp_rank: int = 0) -> None:
        torch.manual_seed(5)
        self.model = Tiny()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        # torchtitan's factor was a functools.partial; this one has the same numbers as small_run's.
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, functools.partial(_falling, 1))
        self.train_state = wrappers_of_2024.TrainState()
        self.loader = wrappers_of_2024.Loader(dp_rank, {"_sample_idx": 7})
        self.states = {
            "model": wrappers_of_2024.Model(self.model),
            "optimizer": wrappers_of_2024.Optimizer(self.model, self.optimizer),
            "lr_scheduler": self.scheduler,
            "train_state": self.train_state,
            "dataloader": self.loader,
        }

    def load(self, path: Path, *names: str) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp_load({name: self.states[name] for name in names or self.states}, checkpoint_id=path, no_dist=True)

    def moments(self) -> list[dict[str, Any]]:
        return list(self.optimizer.state_dict()["state"].values())


def _falling(first: int, done: int) -> float:
    return 1 / (first + done)


@pytest.fixture
def saved(start_run: StartRun) -> SmallRun:
    """Return a run that was saved at step 4."""
    run = start_run()
    run.manager.load()
    run.train(4)
    return run


def test_model_optimizer_and_schedule_are_loaded_without_conversion(saved: SmallRun) -> None:
    theirs = Theirs()
    theirs.load(saved.root / "step-4", "model", "optimizer", "lr_scheduler")
    assert same(dict(theirs.model.state_dict()), saved.contents()["model"])
    assert same(theirs.moments(), saved.contents()["moments"])
    assert theirs.scheduler.last_epoch == 4
    assert theirs.scheduler.get_last_lr() == saved.scheduler.get_last_lr()


def test_of_the_train_state_only_the_step_is_loaded_without_conversion(saved: SmallRun) -> None:
    path = saved.root / "step-4"
    step = {"train_state": {"step": torch.tensor(0, dtype=torch.int32)}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp_load(step, checkpoint_id=path, no_dist=True)
    assert step["train_state"]["step"] == 4
    with pytest.raises(CheckpointException, match="expected BytesStorageMetadata"):
        Theirs().load(path, "train_state")


def test_after_conversion_all_of_it_is_loaded_and_the_run_continues_as_ours(saved: SmallRun, tmp_path: Path) -> None:
    target = tmp_path / "titan" / "step-4"
    before = {path.name: path.read_bytes() for path in (saved.root / "step-4").iterdir()}
    convert(saved.root / "step-4", target, dp_ranks=2)
    assert {path.name: path.read_bytes() for path in (saved.root / "step-4").iterdir()} == before
    assert not (target / "manifest.json").exists(), "a folder of torchtitan has no manifest"
    theirs = Theirs(dp_rank=1)
    theirs.load(target)
    assert theirs.train_state.step == 4
    assert theirs.train_state.log_steps == [1, 2, 3, 4]
    assert theirs.train_state.global_avg_losses == saved.losses
    assert theirs.train_state.global_max_losses == saved.losses
    assert theirs.loader.position == {}
    assert same(dict(theirs.model.state_dict()), saved.contents()["model"])
    assert same(theirs.moments(), saved.contents()["moments"])
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


def test_a_converted_checkpoint_is_loaded_here_too(saved: SmallRun, start_run: StartRun, tmp_path: Path) -> None:
    convert(saved.root / "step-4", tmp_path / "titan" / "step-4")
    run = start_run(
        tmp_path / "again", initial_load_path=str(tmp_path / "titan" / "step-4"), initial_load_model_only=False
    )
    assert run.manager.load()
    assert (run.train_state.step, run.losses) == (4, saved.losses)
    assert same(run.contents()["moments"], saved.contents()["moments"])


def test_a_damaged_checkpoint_is_not_converted_and_no_folder_is_replaced(saved: SmallRun, tmp_path: Path) -> None:
    target = tmp_path / "step-4"
    with pytest.raises(ValueError, match="is not a checkpoint of this package"):
        convert(tmp_path, target)
    with pytest.raises(ValueError, match="exists"):
        convert(saved.root / "step-4", saved.root / "step-4")
    file = saved.root / "step-4" / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)
    with pytest.raises(DamagedRange):
        convert(saved.root / "step-4", target)
    assert not target.exists()
