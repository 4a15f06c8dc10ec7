"""A finished run has written everything it should, and a rerun writes what is missing.

A run with an export is killed at each point between its last full save and the end of the export. Then the same command
runs again: the export exists, its weights are those of the full checkpoint bit for bit, and no step was trained.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.checkpoint.one_file import as_one_file
from tests.e2e.jobs import Job, run, start
from tests.examples import mostly_exhaustive
from tests.processes import read_lines

STEPS = "--training.steps=2"
TRACED = "--training.trace_samples"
EXPORT = ("--checkpoint.export_folder=export", "--checkpoint.model_weights_only", "--checkpoint.export_dtype=bfloat16")
ENDED_BY_DATA = "--training.max_epochs=1"
IN_EXPORT = "path=export/step-2.staging-*/*"

POINTS = {
    "committed": "",  # of the full checkpoint, before the export starts
    "save": "after=1",
    "preflight": "after=1",
    "plan": "after=1",
    "open": IN_EXPORT,
    "write": IN_EXPORT,
    "fsync": IN_EXPORT,
    "metadata": "after=1",
    "manifest": "after=1",
    "seal": "after=1",
    "commit": "after=1",
    "committed+1": "after=1",
}
"""Points of the last step, with the conditions that select the export."""
WITH_ALL = ("committed", "write", "manifest", "commit", "committed+1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump folder of a run of two steps without an export."""
    return run(tmp_path_factory.mktemp("finished") / "run", STEPS, TRACED).dump_folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("point", mostly_exhaustive(POINTS, kept=WITH_ALL))
def test_after_a_kill_between_the_last_save_and_the_end_of_the_export_a_rerun_exports(
    point: str, tmp_path: Path
) -> None:
    conditions = ",".join(filter(None, ("step=2", POINTS[point])))
    fault = {"TORCHTITAN_LITE_FAULT": f"kill@{point.partition('+')[0]}:{conditions}"}
    with start(tmp_path / "run", STEPS, TRACED, *EXPORT, environment=fault) as job:
        assert job.wait() == [-9], job.log
    assert "step-2" in job.checkpoints, "the full checkpoint was saved before the kill"
    _exports_and_trains_nothing(tmp_path / "run")


@pytest.mark.slow  # two jobs of two ranks
def test_after_a_kill_of_one_rank_before_the_export_a_rerun_exports(tmp_path: Path) -> None:
    fault = {"TORCHTITAN_LITE_FAULT": "kill@plan:step=2,rank=1,after=1"}
    timeouts = ("--comm.init_timeout_seconds=10", "--checkpoint.timeout_seconds=10")
    with start(tmp_path / "run", STEPS, TRACED, *EXPORT, *timeouts, ranks=2, environment=fault) as job:
        assert job.processes[1].wait(60) == -9
        job.kill()
    _exports_and_trains_nothing(tmp_path / "run", ranks=2)


@pytest.mark.slow
def test_a_finished_run_that_is_started_again_with_an_export_exports_once(copied: Path) -> None:
    _exports_and_trains_nothing(copied)


@pytest.mark.slow  # two more starts of a job
def test_an_export_is_written_again_for_another_dtype_or_if_it_is_cut_short(copied: Path) -> None:
    run(copied, STEPS, *EXPORT)
    run(copied, STEPS, *EXPORT, "--checkpoint.export_dtype=float32")
    assert _dtypes(copied / "export" / "step-2") == {torch.float32}
    (file,) = (copied / "export" / "step-2").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    run(copied, STEPS, *EXPORT)
    _is_the_export_of(copied)


@pytest.mark.slow  # three starts of a job
@pytest.mark.parametrize("export", [(), ("--checkpoint.model_weights_only",), EXPORT], ids=["full", "weights", "both"])
def test_a_run_whose_data_ended_is_finished_and_a_rerun_trains_nothing(export: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("a line of the corpus\n" * 60)
    data = ("--training.dataset=text", f"--training.dataset_path={tmp_path}/corpus.txt", ENDED_BY_DATA)
    arguments = ("--training.steps=100", "--checkpoint.interval=4", TRACED, *data, *export)
    first = run(tmp_path / "run", *arguments)
    assert first.log.count("Training completed") == 1
    last = max(first.losses())
    assert 4 < last < 100 and last % 4, "the data ends between two periodic saves"
    if export == EXPORT:
        shutil.rmtree(tmp_path / "run" / "export")
    again = run(tmp_path / "run", *arguments)
    _trained_nothing(again, first.losses())
    assert again.log.count("Training completed") == 1
    if export == EXPORT:
        _is_the_export_of(tmp_path / "run", last)
    more = run(tmp_path / "run", *arguments, "--training.max_epochs=2")
    assert max(more.losses()) > last


def _exports_and_trains_nothing(folder: Path, *, ranks: int = 1) -> None:
    before = {line["step"]: line["loss_metrics/global_avg_loss"] for line in read_lines(folder / "metrics.jsonl")}
    job = run(folder, STEPS, TRACED, *EXPORT, ranks=ranks)
    _trained_nothing(job, before)
    _is_the_export_of(folder)
    assert job.events()[-1]["event"] == "finished"
    assert job.log.count("Training completed") == 1
    again = run(folder, STEPS, TRACED, *EXPORT, ranks=ranks)
    assert "Training completed: step 2 of 2 is in" in again.log
    assert "Loading the checkpoint" not in again.log, "a rerun of a complete run loads nothing and ends"


def _trained_nothing(job: Job, before: dict[int, float]) -> None:
    assert job.losses() == before
    assert "Training starts" not in job.log
    for trace in (job.dump_folder / "samples").iterdir():
        assert [line["step"] for line in read_lines(trace)] == sorted(before)


def _is_the_export_of(folder: Path, step: int = 2) -> None:
    """Check that the export folder has only the weights of the full checkpoint, cast, bit for bit."""
    assert sorted(path.name for path in (folder / "export").iterdir()) == [f"step-{step}"]
    full = as_one_file(folder / "checkpoint" / f"step-{step}")["model"]
    exported = as_one_file(folder / "export" / f"step-{step}")
    assert exported.keys() == full.keys()
    for name, tensor in full.items():
        assert torch.equal(exported[name], tensor.bfloat16()), name


def _dtypes(checkpoint: Path) -> set[torch.dtype]:
    return {tensor.dtype for tensor in as_one_file(checkpoint).values()}


@pytest.mark.slow  # three starts of a job
def test_a_dry_run_of_a_finished_run_reports_that_it_would_end_or_only_export(
    copied: Path,
) -> None:
    dry = (STEPS, "--checkpoint.dry_run")
    assert "It would end at once. Training completed: step 2 of 2 is in" in run(copied, *dry).log
    without_export = run(copied, *dry, *EXPORT).log
    assert "Nothing is left to train after step 2, but its weights would be exported" in without_export
    assert not (copied / "export").exists()
    run(copied, STEPS, "--checkpoint.model_weights_only", "--checkpoint.export_folder=export")
    assert "It would end at once." in run(copied, *dry, "--checkpoint.export_folder=export").log
