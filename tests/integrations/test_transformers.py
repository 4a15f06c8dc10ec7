"""The Trainer of transformers with our manager: killed and resumed runs are straight ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.integrations.killed import all_losses, run_until_it_ends, twice
from tests.integrations.served import Served, continues, served
from torchtitan_lite.errors import ConfigError

pytestmark = [
    pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed"),
    pytest.mark.slow,  # the import of transformers takes seconds
]

HOOKS = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")
INTERVAL = 3
ALL_OF_IT = {"max_steps": 20}


@pytest.fixture(scope="module")
def trainer() -> Iterator[Served]:
    with served("trainer_run") as server:
        yield server


class Case(NamedTuple):
    """What is trained on how many ranks, and where it is killed other than at a drawn step."""

    ranks: int
    keys: dict[str, Any]
    also_at: Sequence[int]
    options: dict[str, Any]


def case(ranks: int = 1, keys: dict[str, Any] | None = None, also_at: Sequence[int] = (), **options: Any) -> Case:
    return Case(ranks, {"interval": INTERVAL} | (keys or {}), also_at, {"arguments": ALL_OF_IT} | options)


CASES = {
    "one process": case(keys={"async_mode": "async"}),
    # Twelve samples are six steps: killed right before, at and after the last one of an epoch, and at that of the run.
    "at the end of an epoch": case(num_samples=12, also_at=[12, 13, 20]),
    "LoRA": case(lora=True, keys={"save_trained_only": True}),
    "DDP": case(2, keys={"async_mode": "async"}),
    "several batches a step": case(
        2,
        arguments={"num_train_epochs": 10, "gradient_accumulation_steps": 4},
        num_samples=24,
        keys={"async_mode": "async_with_pinned_mem"},
    ),
    "evaluated, with workers": case(
        patience=6,  # It ends the run, and what it has counted is of many steps.
        arguments={
            "max_steps": 40,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "dataloader_num_workers": 2,
            "metric_for_best_model": "loss",
        },
    ),
}
IN_ALL = ("LoRA", "DDP")
"""The cases that are not left to --exhaustive."""


@pytest.mark.parametrize(
    "name", [each if each in IN_ALL else pytest.param(each, marks=pytest.mark.exhaustive) for each in CASES]
)
def test_a_killed_run_has_the_losses_and_the_state_of_one_that_was_not(
    name: str, trainer: Served, tmp_path: Path, draw: random.Random
) -> None:
    ranks, keys, also_at, options = CASES[name]
    straight = trainer.run(tmp_path / "straight.log", ranks, folder=tmp_path / "straight", keys=keys, **options)
    assert straight.codes == [0] * ranks, straight.output
    last = max(step for _, step, _ in straight.losses)
    assert last >= 20
    # The step at which the second save begins is over then, so the first one is committed.
    drawn = [{"kill_at": step, "kill_in": draw.choice(HOOKS)} for step in twice(draw, 2 * INTERVAL + 2, last)]
    for kills in [drawn, *([{"kill_at": step}] for step in also_at)]:
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        runs = run_until_it_ends(kills, trainer.run, folder, ranks, keys=keys, **options)
        saved = range(INTERVAL, kills[-1]["kill_at"], INTERVAL)
        assert runs[-1].first_step - 1 in saved[-3:], "at most the save that was under way is lost"
        assert continues(runs[-1], straight), f"{kills}: {runs[-1].output}"
        assert all_losses(runs) == straight.losses, f"{kills}"


def test_on_a_signal_all_ranks_save_the_same_step_and_leave_and_the_next_start_continues(
    trainer: Served, tmp_path: Path, draw: random.Random
) -> None:
    straight = trainer.run(tmp_path / "straight.log", 2, folder=tmp_path / "straight", arguments=ALL_OF_IT)
    options: dict[str, Any] = {"folder": tmp_path / "run", "arguments": ALL_OF_IT, "keys": {"interval": 100}}
    left = trainer.run(tmp_path / "left.log", 2, signal_at=draw.randint(1, 17), **options)
    assert left.codes == [143, 143], left.output
    resumed = trainer.run(tmp_path / "resumed.log", 2, **options)
    assert resumed.codes == [0, 0], resumed.output
    assert continues(resumed, straight)
    over = trainer.run(tmp_path / "over.log", 2, **options)
    assert over.codes == [0, 0], over.output
    assert not over.losses, "a run that has ended trains no step"
    assert [end["values"] for end in over.end] == [end["values"] for end in straight.end]


@pytest.mark.exhaustive  # accelerate, of which this is a consequence, is always asked
def test_fsdp2_could_not_be_tried_because_the_trainer_makes_ddp_of_it_without_a_device(
    trainer: Served, tmp_path: Path
) -> None:
    arguments = {"max_steps": 2, "fsdp": "full_shard", "fsdp_config": {"version": 2}}
    asked = trainer.run(tmp_path / "asked.log", 2, folder=tmp_path / "run", arguments=arguments)
    assert [end["model"] for end in asked.end] == ["DistributedDataParallel"] * 2, asked.output


@pytest.mark.exhaustive
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
    from torchtitan_lite.integrations.transformers import _refuse_arguments

    arguments = {"n_gpu": 0, "save_strategy": "no", "output_dir": "outputs"} | given
    kind = arguments.pop("kind", "NO")
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value=kind) if kind != "NO" else kind)
    with pytest.raises(ConfigError) as error:
        _refuse_arguments(SimpleNamespace(accelerator=accelerator, args=SimpleNamespace(**arguments)), "outputs")
    return str(error.value)


def test_what_was_not_tried_or_saves_into_the_same_folder_is_refused_by_name(tmp_path: Path) -> None:
    from torchtitan_lite.integrations.transformers import Checkpoints

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
    from torchtitan_lite.integrations.transformers import Checkpoints

    with pytest.raises(ConfigError, match=r"Call Checkpoints\(\.\.\.\)\.train\(trainer\) in its place"):
        Checkpoints(tmp_path).on_train_begin(None, None, None)  # type: ignore[arg-type]  # as the Trainer calls it
