"""What is wrong with an argument is said by the constructor, in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.checkpoint.small_run import Loader, job_config
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.state.train_state import TrainState
from torchtitan_lite.config.job_config import Checkpoint, Job, JobConfig
from torchtitan_lite.errors import ConfigError


class Halfway:
    """Saves, and loads nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def manager(tmp_path: Path, **given: Any) -> CheckpointManager:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments: dict[str, Any] = {
        "dataloader": None,
        "model_parts": [model],
        "optimizers": [optimizer],
        "lr_schedulers": [],
        "states": {},
        "job_config": job_config(tmp_path),
    }
    return CheckpointManager(**arguments | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"dataloader": DataLoader([1, 2])},
            r"a DataLoader has no state.*begin.*StatefulDataLoaderAdapter\(loader, rank=0, num_ranks=1\).*None",
        ),
        ({"dataloader": Halfway()}, r"a Halfway has no state.*Give it state_dict and load_state_dict"),
        (
            {"dataloader": nn.Linear(1, 1)},
            r"dataloader: .*found a Linear\.",
        ),
        ({"dataloader": [Loader()]}, r"dataloader: .*found a list\."),
        (
            {"model_parts": {"g": nn.Linear(1, 1)}},
            r"model: .*found a dict\.",
        ),
        ({"states": [TrainState()]}, r"states: expected a dict of names and states, found a list\."),
        ({"states": {"step": 3}}, r"states: 'step' is an int, which has no state_dict and load_state_dict"),
        ({"states": {"train_state": TrainState}}, r"'train_state' is the class TrainState"),
        ({"states": {7: TrainState()}}, r"states: expected strings as names, found 7"),
        ({"job_config": {"checkpoint": {}}}, r"job_config: expected a JobConfig, found a dict\."),
    ],
)
def test_a_wrong_argument_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        manager(tmp_path, **given)


def test_a_loader_that_is_none_or_has_a_state_is_taken(tmp_path: Path) -> None:
    for number, loader in enumerate((None, Loader()), start=1):
        with manager(tmp_path / str(number), dataloader=loader) as taken:
            assert taken.save(1, force=True)


def test_a_path_as_the_dump_folder_is_saved_into(tmp_path: Path) -> None:
    config = JobConfig(
        job=Job(dump_folder=tmp_path),  # type: ignore[arg-type]  # people do
        checkpoint=Checkpoint(enable_checkpoint=True, preemption_signals=()),
    )
    with manager(tmp_path, job_config=config) as saving:
        assert saving.save(1, force=True)
    assert (tmp_path / "checkpoint" / "step-1").is_dir()


def test_a_run_without_optimizer_schedule_or_further_states_is_taken(tmp_path: Path) -> None:
    with CheckpointManager(None, nn.Linear(1, 1), None, None, None, job_config(tmp_path)) as saving:
        assert saving.save(1, force=True)


def test_the_calls_of_torchtitan_of_november_2024_save_and_resume(tmp_path: Path) -> None:
    for begin, end in ((0, 2), (2, 3)):
        model, train_state = nn.Linear(1, 1), TrainState()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpoint = CheckpointManager(
            dataloader=Loader(),
            model_parts=[model],
            optimizers=[optimizer],
            lr_schedulers=[torch.optim.lr_scheduler.ConstantLR(optimizer)],
            states={"train_state": train_state},
            job_config=job_config(tmp_path, interval=1),
        )
        assert checkpoint.load(step=-1) == (begin > 0)
        assert train_state.step == begin
        checkpoint.reset()
        while train_state.step < end:
            train_state.step += 1
            checkpoint.maybe_wait_for_staging()
            optimizer.step()
            checkpoint.save(curr_step=train_state.step, force=(train_state.step == end))
        checkpoint.close()


def test_a_bare_stream_of_hugging_face_is_named_with_what_to_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"x": [1, 2]}).to_iterable_dataset()
    CheckpointManager.for_loop(model=nn.Linear(1, 1), dataloader=stream, folder=tmp_path)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("dataloader: after a resume, each further epoch")
    assert "HuggingFaceStreamAdapter" in warning
