"""Which checkpoint a start takes, where disk and upload folder have runs that left one another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.small_run import SmallRun
from tests.uploading.runs import run_of, steps_in
from torchtitan_lite.errors import AllCheckpointsDamaged, UploadRefused
from torchtitan_lite.store.store import CheckpointStore
from torchtitan_lite.uploading import record


def trained(folder: Path, other: Path | str, steps: int, **config: Any) -> SmallRun:
    run = run_of(folder, other, **config).loaded().finished(steps)
    return run


def saves_in(folder: Path) -> list[tuple[int, str]]:
    return [(info.step, info.run_id) for info in CheckpointStore(folder).committed()]


@pytest.mark.parametrize("name", ["__0_0.distcp", "manifest.json"])
def test_where_all_that_is_left_is_damaged_nothing_begins_from_scratch(tmp_path: Path, other: Path, name: str) -> None:
    trained(tmp_path / "run", other, 2)
    shutil.rmtree(tmp_path / "run")
    for step in (1, 2):
        path = other / f"step-{step}" / name
        path.write_bytes(bytes(each ^ 1 for each in path.read_bytes()))
    with run_of(tmp_path / "run", other) as run, pytest.raises(AllCheckpointsDamaged):
        run.manager.load()


@pytest.mark.slow
def test_a_branch_is_uploaded_though_retention_removed_its_first_step(tmp_path: Path, other: Path) -> None:
    trained(tmp_path / "run", other, 12)
    trained(tmp_path / "run", "", 8, load_step=4, keep_latest_k=2)
    assert steps_in(tmp_path / "run" / "checkpoint") == [7, 8]
    run = trained(tmp_path / "run", other, 9, keep_latest_k=2)
    assert saves_in(other) == saves_in(run.root)
    shutil.rmtree(tmp_path / "run")
    with run_of(tmp_path / "run", other).loaded() as again:
        assert again.train_state.step == 9


@pytest.mark.slow
def test_a_run_that_counts_again_is_uploaded_and_found(tmp_path: Path, other: Path) -> None:
    trained(tmp_path / "run", other, 8)
    excluded = ("train_state", "lr_scheduler", "dataloader")
    trained(tmp_path / "run", "", 4, exclude_from_loading=excluded, keep_latest_k=2)
    run = trained(tmp_path / "run", other, 5, exclude_from_loading=excluded, keep_latest_k=2)
    assert saves_in(other) == saves_in(run.root)


@pytest.mark.slow
def test_a_folder_of_another_run_is_refused_after_a_roll_back_too(tmp_path: Path) -> None:
    foreign = trained(tmp_path / "foreign", "", 6).root
    before = saves_in(foreign)
    trained(tmp_path / "run", "", 3)
    trained(tmp_path / "run", "", 3, load_step=2)
    with pytest.raises(UploadRefused, match="it has checkpoints of another run,"):
        trained(tmp_path / "run", foreign, 5, keep_latest_k=1)
    assert saves_in(foreign) == before


@pytest.mark.slow
def test_an_old_disk_follows_the_branch_that_the_upload_folder_has(tmp_path: Path, other: Path) -> None:
    trained(tmp_path / "old", other, 6)
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    for steps in range(4, 9):  # The commit that abandons leaves the upload folder, too.
        trained(tmp_path / "new", other, steps, load_step=3, keep_latest_k=2)
    with run_of(tmp_path / "old", other).loaded() as run:
        assert run.train_state.step == 8
        run.step()
        run.manager.wait()
    assert [step for step, _ in saves_in(tmp_path / "old" / "checkpoint")][-1] == 9
    assert len({run for step, run in saves_in(other) if step > 3}) == 1


@pytest.mark.slow
def test_what_the_branch_there_has_left_is_not_sent_at_each_start(tmp_path: Path, other: Path) -> None:
    trained(tmp_path / "old", "", 6)
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    trained(tmp_path / "new", other, 4, load_step=3)
    with run_of(tmp_path / "old", other).loaded() as run:
        assert run.train_state.step == 4
        run.manager.reset()
    assert run.events.steps("upload_failed") == run.events.steps("uploaded") == []
    assert steps_in(other) == [1, 2, 3, 4]


@pytest.mark.slow
def test_the_same_load_step_continues_a_branch_that_only_the_upload_folder_has(tmp_path: Path, other: Path) -> None:
    trained(tmp_path / "old", other, 5)
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    trained(tmp_path / "new", other, 8, load_step=3)
    with run_of(tmp_path / "old", other, load_step=3).loaded() as run:
        assert run.train_state.step == 8


@pytest.mark.slow
def test_a_file_that_another_run_left_where_an_upload_was_cut_is_not_taken(tmp_path: Path, other: Path) -> None:
    run = trained(tmp_path / "run", "", 1)
    info, place = CheckpointStore(run.root).get(1), "step-1.staging"
    stale = other / place / "__0_0.distcp"
    stale.parent.mkdir(parents=True)
    size = (run.root / "step-1" / "__0_0.distcp").stat().st_size
    stale.write_bytes(bytes(size))
    begun = record.Begun((1, info.run_id, info.created_at), place, {"__0_0.distcp": size})
    folder_id = CheckpointStore(other).folder_id(make=True)
    record.write_record(run.root, record.Record(str(other), folder_id, begun))
    trained(tmp_path / "run", other, 2)
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(other / "step-2")
    with run_of(tmp_path / "run", other).loaded() as again:
        assert again.train_state.step == 1


def test_a_checkpoint_that_lacks_a_file_holds_up_no_other_one(tmp_path: Path, other: Path) -> None:
    run = trained(tmp_path / "run", "", 2)
    (run.root / "step-1" / "__0_0.distcp").unlink()
    run = trained(tmp_path / "run", other, 3)
    assert steps_in(other) == [2, 3]
    assert run.events.steps("upload_failed") == [1]


@pytest.mark.slow
def test_a_record_with_the_name_of_something_else_removes_nothing(tmp_path: Path, other: Path) -> None:
    run = trained(tmp_path / "run", other, 2)
    (other / "precious").mkdir()
    known = record.read(run.root, str(other))
    begun = record.Begun((7, "x", 1.0), "precious")
    record.write_record(run.root, record.Record(str(other), known.folder_id, begun, known.stored))
    trained(tmp_path / "run", other, 3)
    assert (other / "precious").is_dir()
    assert record.read(run.root, str(other)).begun is None


def test_each_folder_has_a_record_of_its_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        record.write_record(tmp_path, record.Record(f"s3://bucket/{name}", name))
    assert [record.read(tmp_path, f"s3://bucket/{name}").folder_id for name in ("a", "b")] == ["a", "b"]
    assert record.read(tmp_path, "s3://bucket/c") == record.Record("s3://bucket/c")
    (tmp_path / "uploads.json").write_text("{")
    assert record.read_all(tmp_path) == []


def test_fields_that_a_later_version_added_stay_in_the_records(tmp_path: Path) -> None:
    for name in ("a", "b"):
        record.write_record(tmp_path, record.Record(f"s3://bucket/{name}", name))
    path = tmp_path / "uploads.json"
    later = json.loads(path.read_text()) | {"format_version": 8, "mood": "good"}
    for each in later["uploads"]:
        each["weight"] = 3
    path.write_text(json.dumps(later))
    record.write_record(tmp_path, record.Record("s3://bucket/a", "c"))
    later["uploads"][0]["folder_id"] = "c"
    assert json.loads(path.read_text()) == later


@pytest.mark.slow
def test_records_from_before_the_first_release_end_the_uploads_and_stay(tmp_path: Path, other: Path) -> None:
    run = trained(tmp_path / "run", "", 1)
    path = run.root / "uploads.json"
    path.write_text('{"uploads": []}\n')
    with pytest.raises(UploadRefused, match=r"uploads\.json has format version 1, from before the first release"):
        trained(tmp_path / "run", other, 2)
    assert steps_in(run.root) == [1, 2]
    assert path.read_text() == '{"uploads": []}\n'
