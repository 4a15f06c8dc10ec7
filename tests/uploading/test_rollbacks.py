"""A run that rolled back by itself, and lost its disk: what it skips is in the upload folder, too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.resume.rolling_back import record, straight, train
from tests.checkpoint.small_run import SmallRun, same
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.store import layout
from torchtitan_lite.store.store import CheckpointStore
from torchtitan_lite.uploading.uploader import UploadJob, upload_all


def run_of(tmp_path: Path, other: Path | str, **config: Any) -> SmallRun:
    options = {"interval_type": "none", "at_steps": (5, 6)} | config
    return SmallRun(tmp_path / "run", upload_folder=str(other), **options)


def expected(tmp_path: Path) -> dict[str, Any]:
    return straight(lambda **config: SmallRun(tmp_path / "straight", **config), without={8})


def upload(root: Path, other: Path) -> None:
    upload_all(UploadJob(str(root), str(other)), lambda state: None)


def test_a_start_with_an_empty_disk_skips_what_the_run_skipped(tmp_path: Path, other: Path) -> None:
    with run_of(tmp_path, other).loaded() as run:
        train(run, poisoned=(), steps=7, ends=False)
        assert run.manager.roll_back(8, "loss is nan") == 6
        train(run, poisoned=(), steps=6, ends=False)
    shutil.rmtree(tmp_path / "run")
    with run_of(tmp_path, other, load_only=True).resumed() as reader:
        assert reader.manager.batches_to_skip(8) == 1
        assert not (reader.root / layout.ROLLBACKS).exists()
    with run_of(tmp_path, other).resumed() as again:
        assert again.events.figures("loaded")["origin"] == "upload_folder"
        assert again.manager.batches_to_skip(8) == 1
        assert len(record(again)) == 1
        train(again, poisoned={8})
        assert same(again.contents(), expected(tmp_path) | {"loader": again.contents()["loader"]})


def test_a_run_that_was_cut_while_it_rolled_back_does_so_with_an_empty_disk(tmp_path: Path, other: Path) -> None:
    with run_of(tmp_path, "").loaded() as run:
        train(run, poisoned=(), steps=7, ends=False)
        run.manager.roll_back(8, "loss is nan")
        (before,) = record(run)
    upload(run.root, other)
    shutil.rmtree(tmp_path / "run")
    with run_of(tmp_path, other).resumed() as again:
        assert record(again) == [before | {"target": 6}]
        train(again, poisoned={8})
        assert same(again.contents(), expected(tmp_path) | {"loader": again.contents()["loader"]})


def test_a_record_on_an_old_disk_is_completed_in_both_folders(tmp_path: Path, other: Path) -> None:
    with run_of(tmp_path, other, interval_type="steps", interval=1).loaded() as run:
        train(run, poisoned={3}, steps=4)
        shutil.copytree(tmp_path / "run", tmp_path / "old")
        train(run, poisoned={7}, steps=8)
    both = record(run)
    assert len(both) == 2
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "old").rename(tmp_path / "run")
    with run_of(tmp_path, other).loaded() as again:
        assert again.train_state.step == 8
        train(again, poisoned=(), steps=9)
    assert record(again) == both
    assert json.loads((other / layout.ROLLBACKS).read_bytes())["rollbacks"] == both


def test_what_is_no_record_stops_the_upload_and_is_named(tmp_path: Path, other: Path) -> None:
    run = run_of(tmp_path, "").loaded().finished(5)
    (run.root / layout.ROLLBACKS).write_text("{}")
    with pytest.raises(CheckpointError, match=r"rollbacks\.json is no record of rollbacks"):
        upload(run.root, other)
    assert CheckpointStore(other).committed() == []
