"""A run that exports at its end, killed around its export: the right step, one export, and no process is left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.images.spoiled import steps_in
from tests.checkpoint.one_file import as_one_file
from tests.e2e.jobs import run, start
from tests.keepers import processes_of

pytestmark = pytest.mark.slow  # Two or three jobs each.

STEPS = ("--training.steps=4", "--checkpoint.interval=100", "--lr_scheduler.warmup_steps=2")
IN_MEMORY = ("--checkpoint.async_mode=async_with_pinned_mem", "--checkpoint.memory_interval=1")
DTYPE = "--checkpoint.export_dtype=bfloat16"
WITH_EXPORT = ("--checkpoint.export_folder=export", "--checkpoint.last_save_model_weights_only", DTYPE)
ONLY = ("--checkpoint.last_save_model_weights_only", DTYPE)
IN_HF = ("--checkpoint.last_save_in_hf", DTYPE)
SLOW = "slow@step:step=2,seconds=1;slow@step:step=4,seconds=1"
"""So that step 3 has an image: the first one takes longest."""

KILLS = {
    "before the full save": (WITH_EXPORT, "commit:step=4", 3),
    "after the full save": (WITH_EXPORT, "committed:step=4", 4),
    "in the export": (WITH_EXPORT, "write:step=4,path=export/step-4.staging-*/*", 4),
    "before the export's commit": (WITH_EXPORT, "commit:step=4,after=1", 4),
    "after the export": (WITH_EXPORT, "committed:step=4,after=1", None),
    "before the only save": (ONLY, "commit:step=4", 3),
    "after the only save": (ONLY, "committed:step=4", None),
    "before the save of what hf gets": (IN_HF, "commit:step=4", 3),
    "in hf": (IN_HF, "hugging_face", None),
}
"""The arguments, the point of the kill, and the step that the next start loads: None if it has nothing to load."""


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump folder of a run that nothing interrupts, with a full save at its end."""
    return run(tmp_path_factory.mktemp("straight") / "run", *STEPS).dump_folder


@pytest.mark.parametrize("kill", KILLS)
def test_a_run_killed_around_its_export_continues_at_the_right_step_and_exports_once(
    kill: str, straight: Path, tmp_path: Path, memory_tier: Path
) -> None:
    arguments, point, loads = KILLS[kill]
    folder = tmp_path / "run"
    fault = {"TORCHTITAN_LITE_FAULT": f"{SLOW};kill@{point}"}
    with start(folder, *STEPS, *IN_MEMORY, *arguments, environment=fault) as job:
        assert job.wait() == [-9], job.log
    assert steps_in(folder / "checkpoint")[-1:] == [3]
    job = run(folder, *STEPS, *IN_MEMORY, *arguments)
    loaded = [(event["step"], event["origin"]) for event in job.events("loaded")]
    assert loaded == ([] if loads is None else [(loads, "memory" if loads == 3 else "disk")]), job.log
    assert "Training completed" in job.log
    assert processes_of(memory_tier) == []
    assert_exported_once(folder, straight)
    again = run(folder, *STEPS, *IN_MEMORY, *arguments)
    assert "To continue, raise --training.steps" in again.log
    assert processes_of(memory_tier) == []
    assert len(again.events("exported")) <= 1


def assert_exported_once(folder: Path, straight: Path) -> None:
    """Check that one export is there, with the weights of `straight`, cast, bit for bit."""
    full = as_one_file(straight / "checkpoint" / "step-4")["model"]
    if (folder / "hf").exists():
        (made,) = (folder / "hf").iterdir()
        assert len(load_file(made / "model.safetensors")) == len(full)
        made = folder / "checkpoint" / "step-4"
        exported = {name: tensor.bfloat16() for name, tensor in as_one_file(made)["model"].items()}
    else:
        made = folder / "export" if (folder / "export").exists() else folder / "checkpoint"
        exported = as_one_file(made / "step-4")
        assert sorted(path.name for path in made.iterdir() if path.is_dir() and "step" in path.name) == ["step-4"]
    assert exported.keys() == full.keys()
    for name, tensor in full.items():
        assert torch.equal(exported[name], tensor.bfloat16()), name
