"""`checkpoint.initial_load_in_hf`: a run that starts from weights in Hugging Face's format, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.checkpoint.one_file import as_one_file
from tests.e2e.jobs import run, start
from tests.processes import read_lines

STEPS = "--training.steps=2"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights in Hugging Face's format, in float32."""
    job = run(tmp_path_factory.mktemp("published") / "run", STEPS, "--checkpoint.last_save_in_hf", "--training.seed=5")
    return job.dump_folder / "hf" / "step-2"


def of(published: Path) -> tuple[str, ...]:
    return "--checkpoint.initial_load_in_hf", f"--checkpoint.initial_load_path={published}"


@pytest.mark.slow
def test_a_run_starts_from_the_weights_and_a_restart_from_its_own_checkpoint(published: Path, tmp_path: Path) -> None:
    job = run(tmp_path / "run", STEPS, *of(published))
    assert f"Importing {published} as step 0" in job.log and f"Imported {published} as step 0: 3.1 MiB in" in job.log
    assert "Loading the checkpoint at step 0." in job.log and "Training starts at step 1," in job.log
    (event,) = job.events("imported")
    assert event["step"] == 0 and event["path"] == str(published) and event["bytes"] > 0
    assert job.checkpoints == ["step-0", "step-2", "writer.lock"] or job.checkpoints == ["step-0", "step-2"]
    imported = _model_of(job.dump_folder, 0)
    for name, tensor in _model_of(published.parents[1], 2).items():
        assert torch.equal(imported[name], tensor), name
    again = run(tmp_path / "run", "--training.steps=3", *of(published.with_name("gone")))
    assert "Training starts at step 3," in again.log
    assert len(again.events("imported")) == 1, "a run with a checkpoint imports nothing, and reads nothing there"


@pytest.mark.slow  # two jobs, of four ranks and of one
def test_every_topology_starts_from_the_same_weights(published: Path, tmp_path: Path) -> None:
    one = run(tmp_path / "one", STEPS, *of(published), "--training.global_batch_size=4")
    split = ("--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_degree=2")
    four = run(tmp_path / "four", STEPS, *of(published), *split, "--training.global_batch_size=4", ranks=4)
    assert four.losses()[1] == pytest.approx(one.losses()[1], abs=1e-5)
    assert len(four.events("imported")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("point", ["open", pytest.param("write", marks=pytest.mark.slow)])
def test_a_kill_during_the_import_leaves_no_step_and_a_rerun_imports_again(
    published: Path, tmp_path: Path, point: str
) -> None:
    fault = {"TORCHTITAN_LITE_FAULT": f"kill@{point}:path=.step-0.unfinished/*"}
    with start(tmp_path / "run", STEPS, *of(published), environment=fault) as job:
        assert job.wait() == [-9], job.log
    assert "step-0" not in job.checkpoints
    again = run(tmp_path / "run", STEPS, *of(published))
    assert "Training starts at step 1," in again.log
    assert not list((tmp_path / "run" / "checkpoint").glob(".step*"))


@pytest.mark.slow
def test_a_dry_run_reports_the_import_and_one_that_does_not_fit_and_writes_nothing(
    published: Path, tmp_path: Path
) -> None:
    job = run(tmp_path / "run", *of(published), "--checkpoint.dry_run", "--comm.simulated_ranks=4")
    assert f"It would import {published} as step 0 into {tmp_path}/run, and start from there" in job.log
    with start(tmp_path / "run", *of(published), "--checkpoint.dry_run", "--model.flavor=1B") as other:
        assert other.wait() == [2]
    assert "is another model than this run's: dim 128 instead of 2048" in other.log
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.slow  # four starts of a job
def test_what_cannot_be_imported_is_one_sentence_and_leaves_nothing(published: Path, tmp_path: Path) -> None:
    for given, code, message in (
        ((*of(published), "--checkpoint.load_only"), 2, "has no checkpoint, and a run with load_only imports none"),
        (("--checkpoint.initial_load_in_hf",), 2, "checkpoint.initial_load_in_hf: there is no initial_load_path"),
        ((*of(published), "--checkpoint.no_initial_load_model_only"), 2, "published weights have no optimizer"),
        (of(tmp_path / "nowhere"), 1, "nowhere"),
        (of(_quantized(published, tmp_path)), 2, "is quantized"),
    ):
        with start(tmp_path / "run", STEPS, *given) as job:
            assert job.wait() == [code], job.log
        assert message in job.log and "Traceback" not in job.log
        assert "step-0" not in job.checkpoints
        assert read_lines(tmp_path / "run" / "metrics.jsonl") == []


@pytest.mark.slow  # a start of a job
def test_a_full_disk_during_the_import_is_one_sentence(published: Path, tmp_path: Path) -> None:
    fault = {"TORCHTITAN_LITE_FAULT": "ENOSPC@open:path=.step-0.unfinished/*"}
    with start(tmp_path / "run", STEPS, *of(published), environment=fault) as job:
        assert job.wait() == [1], job.log
    assert "FolderUnusable" in job.log and "No space left" in job.log and "Traceback" not in job.log
    assert not list((tmp_path / "run" / "checkpoint").glob("*step*"))


def _quantized(published: Path, tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(published, tmp_path / "quantized"))
    config = json.loads((copy / "config.json").read_bytes()) | {"quantization_config": {"quant_method": "fp8"}}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def _model_of(dump_folder: Path, step: int) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = as_one_file(dump_folder / "checkpoint" / f"step-{step}")["model"]
    return model
