"""A run that rolled back by itself, and lost its disk: what it skips is in the upload folder, too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.resume.rolling_back import record, straight, train
from tests.checkpoint.small_run import SmallRun, same
from tests.cli.command import command
from torchtitan_lite import faults
from torchtitan_lite.errors import CheckpointError, TrainingDiverged, UploadRefused
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_what_is_brought_back_is_not_left_again_because_of_the_record_there(tmp_path: Path, other: Path) -> None:
    with run_of(tmp_path, "", interval_type="steps", interval=1).loaded() as run:
        train(run, poisoned=(), steps=7, ends=False)
        run.manager.roll_back(5, "loss is nan")
        train(run, poisoned=(), steps=5, ends=False)
    upload(run.root, other)
    (aside,) = run.root.glob("step-7.abandoned-*")
    assert command("bring-back", str(run.root), aside.name, "--leave-branch").code == 0
    with run_of(tmp_path, other, interval_type="steps", interval=1).resumed() as again:
        assert (again.train_state.step, again.manager.batches_to_skip(5)) == (7, 0)
        assert [each["is_left"] for each in record(again)] == [True]


def test_what_is_no_record_stops_the_upload_and_is_named(tmp_path: Path, other: Path) -> None:
    run = run_of(tmp_path, "").loaded().finished(5)
    (run.root / layout.ROLLBACKS).write_text("{}")
    with pytest.raises(CheckpointError, match=r"rollbacks\.json is no record of rollbacks"):
        upload(run.root, other)
    assert CheckpointStore(other).committed() == []


def uploaded_run(tmp_path: Path, other: Path, kept: tuple[int, ...]) -> None:
    """Train a run of steps 5 and 6, upload both, and leave those in `kept` on its disk: none, or a restored backup."""
    with run_of(tmp_path, other).loaded() as run:
        train(run, poisoned=(), steps=6, ends=False)
    for step in {5, 6}.difference(kept):
        shutil.rmtree(run.root / f"step-{step}")
    if not kept:
        shutil.rmtree(run.root)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [(), (5,)], ids=["empty disk", "backup"])
def test_a_run_that_began_from_there_rolls_back_to_there_before_its_first_save(
    tmp_path: Path, other: Path, kept: tuple[int, ...]
) -> None:
    uploaded_run(tmp_path, other, kept)
    with run_of(tmp_path, other, at_steps=(10,)).loaded() as run:
        train(run, poisoned={8})
        assert run.events.steps("loaded") == [6, 6]
        assert run.events.figures("loaded")["origin"] == "upload_folder"
        assert same(run.contents(), expected(tmp_path) | {"loader": run.contents()["loader"]})
    assert [info.step for info in CheckpointStore(other).committed()] == [5, 6, 10, 12]
    assert not [*other.glob("*.abandoned-*")]


@pytest.mark.promise(
    "A start after a kill during a rollback finishes the rollback, also from the folder of uploads.",
    section="loaded",
)
@pytest.mark.slow
@pytest.mark.parametrize("kept", [(), (5,)], ids=["empty disk", "backup"])
@pytest.mark.parametrize("point", ["load", pytest.param("rolled_back", marks=pytest.mark.slow)])
def test_a_start_after_a_kill_on_the_way_to_there_gets_there(
    tmp_path: Path, other: Path, kept: tuple[int, ...], point: str
) -> None:
    uploaded_run(tmp_path, other, kept)
    with run_of(tmp_path, other).loaded() as run:
        train(run, poisoned=(), steps=7, ends=False)
        faults.install(f"EIO@{point}", rank=0)
        with pytest.raises(OSError):
            run.manager.roll_back(8, "loss is nan")
        faults.install("", rank=0)
    with run_of(tmp_path, other).loaded() as again:
        assert (again.train_state.step, again.manager.batches_to_skip(8)) == (6, 1)
        assert [each["target"] for each in record(again)] == [6]
        train(again, poisoned={8})
        assert same(again.contents(), expected(tmp_path) | {"loader": again.contents()["loader"]})


@pytest.mark.slow
def test_a_step_there_that_is_damaged_or_after_the_batch_is_no_place_to_go(tmp_path: Path, other: Path) -> None:
    uploaded_run(tmp_path, other, kept=())
    with run_of(tmp_path, other).loaded() as run:
        train(run, poisoned=(), steps=7, ends=False)
        data = other / "step-6" / "__0_0.distcp"
        data.write_bytes(data.read_bytes()[:-1] + b"?")
        assert run.manager.roll_back(8, "loss is nan") == 5
    uploaded_run(tmp_path, tmp_path / "another", kept=(5,))
    with run_of(tmp_path, tmp_path / "another").loaded() as run:
        assert run.manager.roll_back(6, "loss is nan") == 5
        assert run.events.figures("loaded")["origin"] == "disk"


def test_a_branch_that_is_there_goes_before_a_record_on_an_old_disk(tmp_path: Path, other: Path) -> None:
    with run_of(tmp_path, other).loaded() as run:
        train(run, poisoned=(), steps=7, ends=False)
        run.manager.roll_back(8, "loss is nan")
        shutil.copytree(tmp_path / "run", tmp_path / "old")
        train(run, poisoned=())
        contents = run.contents()
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "old").rename(tmp_path / "run")
    with run_of(tmp_path, other).loaded() as again:
        assert same(again.contents(), contents)


def test_steps_of_another_run_are_no_place_to_go(tmp_path: Path, other: Path) -> None:
    uploaded_run(tmp_path, other, kept=())
    run = run_of(tmp_path, other)
    run.manager.reset()
    with pytest.raises(TrainingDiverged, match="there is no checkpoint of step 7 or before"):
        run.manager.roll_back(8, "loss is nan")
    with pytest.raises(UploadRefused, match="checkpoints of another run, "):
        run.finished(8)


def test_where_that_folder_does_not_answer_the_run_says_so_and_stops(
    tmp_path: Path, other: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uploaded_run(tmp_path, other, kept=())
    with pytest.raises(TrainingDiverged), run_of(tmp_path, other).loaded() as run:
        other.rename(tmp_path / "away")
        other.write_text("no folder")
        run.manager.roll_back(8, "loss is nan")
    assert f"What is in {other} is not known" in caplog.text
