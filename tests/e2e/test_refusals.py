"""A resume that would be another run ends before its first step with the reason; a dry run reports it in advance."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.jobs import run, start

MORE_STEPS = "--training.steps=4"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run`, from a job that saved step 2, and with `corpus`, its data."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "corpus").mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / "corpus" / name).write_text("a line of the corpus\n" * 100)
    run(folder / "run", *_of(folder), "--training.steps=2")
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy of `saved` for one test."""
    return Path(shutil.copytree(saved, tmp_path / "copied"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--model.flavor=1B"], 1, ["model.flavor: debugmodel -> 1B", "another job.dump_folder"]),
        (["--model.tokenizer_path=tiktoken.model"], 2, ["model.tokenizer_path", "'bytes'", "'tiktoken.model'"]),
        (["--training.global_batch_size=5"], 2, ["training.global_batch_size: 5", "2 x 1 = 2", "4 and 6 would do"]),
        (
            ["--parallelism.data_parallel_shard_degree=2", "--parallelism.tensor_parallel_degree=2"],
            2,
            ["pp 1 x dp_replicate 1 x dp_shard 2 x tp 2 = 4", "this job has 1 process"],
        ),
    ],
)
def test_a_refusal_comes_before_the_first_step_and_names_the_key_and_both_values(
    arguments: list[str], code: int, said: list[str], saved: Path
) -> None:
    _is_refused(saved, arguments, code, said)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("checkpoint/step-2", "checkpoint"), ("checkpoint", "step-2")])
def test_a_dump_folder_in_a_checkpoint_is_refused_and_nothing_is_written_into_it(
    arguments: tuple[str, str], copied: Path
) -> None:
    before = _names(copied)
    for also in ([], ["--checkpoint.dry_run"]):
        options = [f"--checkpoint.folder={arguments[1]}", *also]
        with start(copied / "run" / arguments[0], *_of(copied), MORE_STEPS, *options) as job:
            assert job.wait() == [2], job.log
        assert "no run writes into a checkpoint. To resume its run, name" in job.log
        assert f"--job.dump_folder={copied}/run --checkpoint.folder=checkpoint" in job.log
        assert _names(copied) == before


@pytest.mark.slow
def test_a_changed_corpus_is_refused_with_the_change_and_a_dry_run_reports_it_in_advance(copied: Path) -> None:
    with (copied / "corpus" / "b.txt").open("a") as file:
        file.write("another line\n")
    said = ["bytes: 4200 -> 4213", "digest: ", "--checkpoint.exclude_from_loading=dataloader"]
    with _unchanged(copied / "run"):
        _is_refused(copied, ["--checkpoint.dry_run"], 1, ["It would be refused:", *said])
    _is_refused(copied, [], 1, ["CorpusChanged: ", *said])


@pytest.mark.slow
def test_a_dry_run_reports_what_a_resume_would_do_and_changes_no_file(copied: Path) -> None:
    with _unchanged(copied / "run"):
        job = run(copied / "run", *_of(copied), MORE_STEPS, "--checkpoint.dry_run", "--optimizer.lr=1e-3")
        assert "step-2, step 2:" in job.log
        assert "optimizer.lr: 0.0008 -> 0.001" in job.log
        assert "It would continue." in job.log
        assert "Training starts" not in job.log
        _is_refused(copied, ["--checkpoint.dry_run", "--model.flavor=1B"], 1, ["model.flavor: debugmodel -> 1B"])


def _of(folder: Path) -> tuple[str, ...]:
    return ("--training.dataset=text", f"--training.dataset_path={folder}/corpus/*.txt")


def _is_refused(folder: Path, arguments: list[str], code: int, said: list[str]) -> None:
    with start(folder / "run", *_of(folder), MORE_STEPS, *arguments) as job:
        assert job.wait() == [code], job.log
    assert all(part in job.log for part in said), job.log
    assert "Traceback" not in job.log and "Training starts" not in job.log
    assert (sorted(job.losses()), job.checkpoints) == ([1, 2], ["step-2"])


@contextmanager
def _unchanged(folder: Path) -> Iterator[None]:
    before = _files(folder)
    yield
    assert _files(folder) == before


def _names(folder: Path) -> list[Path]:
    """Return all that is in `folder` but the logs of jobs, which are next to their dump folders."""
    return sorted(path for path in folder.rglob("*") if path.suffix != ".log")


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
