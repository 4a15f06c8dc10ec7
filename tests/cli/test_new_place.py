"""Where `export`, `convert`, `reshard` and `import-weights` refuse to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import command
from tests.cli.folders import add_step
from tests.store.filled import names

NEW = "name a folder that does not exist yet"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of checkpoints run/checkpoint with steps 3 and 7, from the folder of the run's folder."""
    for step in (3, 7):
        (tmp_path / "run" / "checkpoint").mkdir(parents=True, exist_ok=True)
        add_step(tmp_path / "run" / "checkpoint", step)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run" / "checkpoint"


@pytest.mark.parametrize(
    ("out", "sentence"),
    [
        ("run/checkpoint", f"expected a new folder, found checkpoints in run/checkpoint: {NEW}"),
        ("run", f"expected a new folder, found checkpoints in run/checkpoint: {NEW}"),
        ("run/checkpoint/step-3", f"expected a new folder, found a checkpoint: {NEW}"),
        (
            "run/checkpoint/step-3/hf",
            "expected a place outside of checkpoints, found the checkpoint run/checkpoint/step-3",
        ),
    ],
)
@pytest.mark.parametrize(
    "words",
    [
        ("export", "run:7", "OUT", "--format", "hf"),
        ("convert", "run:7", "OUT"),
        ("reshard", "run:7", "OUT", "--files", "1"),
        ("import-weights", "weights", "OUT"),
    ],
    ids=lambda words: words[0],
)
def test_what_would_be_in_place_of_checkpoints_or_in_one_is_refused(
    run: Path, words: tuple[str, ...], out: str, sentence: str
) -> None:
    ended = command(*(out if word == "OUT" else word for word in words))
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == f"error: OUT {out}: {sentence}\n"
    assert names(run) == ["step-3", "step-7"]


@pytest.mark.parametrize("form", ["hf", "safetensors", "torch", "peft"])
def test_an_export_gets_no_name_that_a_job_takes_for_a_checkpoint(run: Path, form: str) -> None:
    ended = command("export", "run:7", "run/checkpoint/step-9", "--format", form)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        "error: OUT run/checkpoint/step-9: run/checkpoint has checkpoints, and a job there would take step-9 for "
        "one: name OUT in another folder\n"
    )


def test_a_half_written_checkpoint_is_one_too(run: Path) -> None:
    (run.parent / "other" / "step-3").mkdir(parents=True)
    (run.parent / "other" / "step-3" / "__0_0.distcp").write_bytes(b"cut")
    ended = command("export", "run:7", run.parent / "other" / "step-9", "--format", "safetensors")
    assert ended.code == 2 and "has checkpoints, and a job there would take step-9 for one" in ended.err


def test_next_to_checkpoints_and_in_a_new_folder_an_export_may_be(run: Path) -> None:
    for out in ("run/checkpoint/weights", "exports/step-7", "new"):
        assert command("export", "run:7", out).code == 0
    assert names(run) == ["step-3", "step-7", "weights"]
