"""What people see of uploads: the verb, `ls`, the progress line."""

from __future__ import annotations

import json
from pathlib import Path

from tests.checkpoint.small_run import SmallRun
from tests.cli.command import command
from torchtitan_lite.metrics.progress_bar import Progress
from torchtitan_lite.store.store import CheckpointStore


def trained(folder: Path, steps: int = 2) -> Path:
    run = SmallRun(folder, interval=1).loaded().finished(steps)
    return run.root


def test_the_verb_uploads_what_is_missing_and_says_so(tmp_path: Path) -> None:
    source, other = trained(tmp_path / "run"), tmp_path / "other"
    first = command("upload", tmp_path / "run", other)
    assert first.code == 0
    assert f"Uploaded 2 checkpoints of {source}\nto {other}: " in first.out
    again = command("upload", source, other)
    assert again.out.strip() == f"{other} has all checkpoints of {source}"
    assert [info.step for info in CheckpointStore(other).committed()] == [1, 2]
    shown = json.loads(command("upload", source, other, "--json").out)
    assert shown == {"folder": str(source), "to": str(other), "uploaded": 0, "bytes": 0}


def test_the_verb_refuses_what_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    source = trained(tmp_path / "run")
    assert command("upload", "s3://bucket/run", tmp_path).code == 2
    assert command("upload", f"{source}:1", tmp_path / "other").code == 2
    ended = command("upload", source, tmp_path / "other", "--max-mb-per-second", "-1")
    assert ended.code == 2
    assert not (tmp_path / "other").exists()


def test_ls_shows_what_is_uploaded(tmp_path: Path) -> None:
    source, other = trained(tmp_path / "run"), tmp_path / "other"
    command("upload", source, other)
    trained(tmp_path / "run", 3)
    text = command("ls", source).out
    assert f"Uploaded to {other}: up to step 2, " in text.replace("\n", " ").replace("  ", " ")
    assert "latest, not uploaded" in text
    listed = json.loads(command("ls", source, "--json").out)
    assert listed["uploads_to"] == str(other)
    assert [each["uploaded_at"] is None for each in listed["checkpoints"]] == [False, False, True]


def test_ls_says_nothing_of_uploads_where_there_are_none(tmp_path: Path) -> None:
    source = trained(tmp_path / "run")
    assert "ploaded" not in command("ls", source).out
    assert json.loads(command("ls", source, "--json").out)["uploads_to"] is None


def test_the_progress_line_has_the_last_upload() -> None:
    assert "uploaded 30" in Progress(40, 100, uploaded=30).fields()
    assert not any("uploaded" in each for each in Progress(40, 100).fields())
