"""The Trainer of transformers with our manager: killed and resumed runs are straight ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integrations.served import Served, continues, served
from torchtitan_lite.errors import ConfigError

pytest.importorskip("accelerate")

from torchtitan_lite.integrations.transformers import Checkpoints, _refuse


@pytest.fixture(scope="module")
def trainer() -> Iterator[Served]:
    with served("trainer_run") as server:
        yield server


ALL_OF_IT = {"max_steps": 20}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one process": (1, {"arguments": ALL_OF_IT}, {"async_mode": "async"}),
    "at the end of an epoch": (1, {"arguments": ALL_OF_IT, "num_samples": 12}, {}),
    "LoRA": (1, {"arguments": ALL_OF_IT, "lora": True}, {"save_trained_only": True}),
    "DDP": (2, {"arguments": ALL_OF_IT}, {"async_mode": "async"}),
    "several batches a step": (
        *(2, {"arguments": {"num_train_epochs": 8, "gradient_accumulation_steps": 4}, "num_samples": 24}),
        {"async_mode": "async_with_pinned_mem"},
    ),
    "evaluated, with workers": (
        1,
        {
            "early_stopping": True,
            "arguments": ALL_OF_IT
            | {"eval_strategy": "steps", "eval_steps": 3, "dataloader_num_workers": 2, "metric_for_best_model": "loss"},
        },
        {},
    ),
}


@pytest.mark.slow  # each starts three times
@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_has_the_losses_and_the_state_of_one_that_was_not(
    case: str, trainer: Served, tmp_path: Path
) -> None:
    ranks, options, keys = CASES[case]
    straight = trainer.run(tmp_path / "straight.log", ranks, folder=tmp_path / "straight", keys=keys, **options)
    assert straight.codes == [0] * ranks, straight.output
    killed = trainer.run(tmp_path / "killed.log", ranks, folder=tmp_path / "run", keys=keys, kill_at=8, **options)
    assert killed.codes == [-9] * ranks, killed.output
    resumed = trainer.run(tmp_path / "resumed.log", ranks, folder=tmp_path / "run", keys=keys, **options)
    assert resumed.codes == [0] * ranks, resumed.output
    assert resumed.first_step in (4, 7)
    assert continues(resumed, straight)


@pytest.mark.slow
def test_on_a_signal_all_ranks_save_the_same_step_and_leave_and_the_next_start_continues(
    trainer: Served, tmp_path: Path
) -> None:
    straight = trainer.run(tmp_path / "straight.log", 2, folder=tmp_path / "straight", arguments=ALL_OF_IT)
    options: dict[str, Any] = {"folder": tmp_path / "run", "arguments": ALL_OF_IT, "keys": {"interval": 100}}
    left = trainer.run(tmp_path / "left.log", 2, signal_at=5, **options)
    assert left.codes == [143, 143], left.output
    resumed = trainer.run(tmp_path / "resumed.log", 2, **options)
    assert resumed.codes == [0, 0], resumed.output
    assert continues(resumed, straight)
    over = trainer.run(tmp_path / "over.log", 2, **options)
    assert over.codes == [0, 0], over.output
    assert not over.losses, "a run that has ended trains no step"
    assert [end["values"] for end in over.end] == [end["values"] for end in straight.end]


@pytest.mark.slow
def test_without_checkpoints_a_run_begins_and_leaves_none(trainer: Served, tmp_path: Path) -> None:
    short = {"folder": tmp_path, "arguments": {"max_steps": 4}}
    saved = trainer.run(tmp_path / "saved.log", **short)
    steps = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    off = trainer.run(tmp_path / "off.log", **short, keys={"enable_checkpoint": False})
    assert (saved.codes, off.codes) == ([0], [0]), off.output
    assert off.losses == saved.losses
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == steps


def refused(**given: Any) -> str:
    """Return how a Trainer with these arguments is refused."""
    arguments = {"n_gpu": 0, "save_strategy": "no", "output_dir": "outputs"} | given
    kind = arguments.pop("kind", "NO")
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value=kind) if kind != "NO" else kind)
    with pytest.raises(ConfigError) as error:
        _refuse(SimpleNamespace(accelerator=accelerator, args=SimpleNamespace(**arguments)), "outputs")
    return str(error.value)


def test_what_was_not_tried_or_saves_into_the_same_folder_is_refused_by_name(tmp_path: Path) -> None:
    assert "found DEEPSPEED" in refused(kind="DEEPSPEED")
    assert "TrainingArguments.load_best_model_at_end" in refused(load_best_model_at_end=True)
    assert "TrainingArguments.auto_find_batch_size" in refused(auto_find_batch_size=True)
    assert "found 2 GPUs in one" in refused(n_gpu=2)
    assert "TrainingArguments.output_dir: expected another folder than outputs" in refused(save_strategy="steps")
    with pytest.raises(ConfigError, match="memory_interval"):
        Checkpoints(tmp_path, memory_interval=3)
    with pytest.raises(ConfigError, match="intervall"):
        Checkpoints(tmp_path, intervall=3)


def test_a_trainer_that_begins_by_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Call Checkpoints\(\.\.\.\)\.train\(trainer\) in its place"):
        Checkpoints(tmp_path).on_train_begin(None, None, None)  # type: ignore[arg-type]  # as the Trainer calls it
