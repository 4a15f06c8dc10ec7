"""A run whose checkpoints are uploaded: nothing waits for it, the end does, and a lost disk costs what is not there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.checkpoint.companions import uploads_of
from tests.checkpoint.small_run import SmallRun, same
from tests.disks import small_disk
from tests.no_threads import no_threads
from tests.store.filled import flip
from tests.uploading.runs import run_of, steps_in
from torchtitan_lite.checkpoint.reading.source import LoadSource
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.errors import CheckpointDamaged, CheckpointError, ConfigError, FolderUnusable, UploadRefused
from torchtitan_lite.store.store import CheckpointStore
from torchtitan_lite.uploading import record


def test_the_end_of_a_run_waits_until_all_is_there(tmp_path: Path, other: Path) -> None:
    with run_of(tmp_path / "run", other) as run:
        assert not run.manager.load()
        run.train(4)
    assert steps_in(other) == [1, 2, 3, 4]
    assert run.events.steps("uploaded")[-1] in (1, 2, 3, 4)
    assert {*run.events.steps("uploaded")} == {1, 2, 3, 4}
    assert run.events.figures("uploaded")["path"] == str(other)


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_save_is_reported_and_uploaded_once_it_is_durable_though_no_call_follows(
    tmp_path: Path, other: Path, mode: str
) -> None:
    with run_of(tmp_path / "run", other, async_mode=mode).loaded() as run:
        run.step()
        run.events.wait_for("committed")
        run.events.wait_for("uploaded")
        run.manager.wait()
    assert run.events.steps("committed") == run.events.steps("uploaded") == [1]
    names = [name for name, *_ in run.events.recorded]
    assert names.index("save_started") < names.index("staged") < names.index("committed") < names.index("uploaded")


def test_where_the_system_has_no_more_threads_the_saves_continue_and_the_end_uploads(
    tmp_path: Path, other: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with run_of(tmp_path / "run", other) as run:
        with no_threads(named="upload"):
            run.manager.load()
            run.manager.reset()
        assert run.events.steps("uploads_ended") == [0]
        run.train(2)
    assert f"Nothing is uploaded to {other} in this start: [Errno 11] can't start new thread" in caplog.text
    assert steps_in(other) == [1, 2]


def test_a_start_with_an_empty_disk_continues_from_there_bit_for_bit(tmp_path: Path, other: Path) -> None:
    straight = SmallRun(tmp_path / "straight", interval=1).loaded().finished(6)
    run_of(tmp_path / "run", other, keep_latest_k=2).loaded().finished(3, last=False)
    shutil.rmtree(tmp_path / "run")
    with run_of(tmp_path / "run", other, keep_latest_k=2).resumed() as run:
        assert run.train_state.step == 3
        assert run.events.figures("loaded")["origin"] == "upload_folder"
        run.train(6)
    assert same(run.contents(), straight.contents())
    assert steps_in(other) == steps_in(run.root) == [5, 6]


def test_the_later_step_of_the_two_folders_is_loaded(tmp_path: Path, other: Path) -> None:
    run_of(tmp_path / "run", other).loaded().finished(3)
    for step in (2, 3):
        shutil.rmtree(tmp_path / "run" / "checkpoint" / f"step-{step}")
    with run_of(tmp_path / "run", other).loaded() as run:
        assert run.train_state.step == 3
    shutil.rmtree(other / "step-3")
    run = SmallRun(tmp_path / "run", interval=1).loaded().finished(4)
    with run_of(tmp_path / "run", other).loaded() as run:
        assert run.train_state.step == 4
        assert run.events.figures("loaded")["origin"] == "disk"


@pytest.mark.slow
def test_a_step_that_is_damaged_on_disk_is_loaded_from_there(tmp_path: Path, other: Path) -> None:
    with run_of(tmp_path / "run", other).loaded() as run:
        run.train(3)
        expected = run.contents()
    flip(run.root / "step-3" / "__0_0.distcp")
    with run_of(tmp_path / "run", other).loaded() as again:
        assert same(again.contents(), expected)
        assert again.events.figures("loaded")["origin"] == "upload_folder"


@pytest.mark.slow
def test_a_step_that_is_damaged_there_is_left_for_an_older_one(tmp_path: Path, other: Path) -> None:
    run_of(tmp_path / "run", other).loaded().finished(3)
    shutil.rmtree(tmp_path / "run")
    flip(other / "step-3" / "__0_0.distcp")
    with run_of(tmp_path / "run", other).loaded() as again:
        assert again.train_state.step == 2


@pytest.mark.slow
def test_a_folder_that_is_not_there_costs_no_save(
    tmp_path: Path, other: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other.write_text("no folder")
    with run_of(tmp_path / "run", other, timeout_seconds=3) as run:
        with pytest.raises(FolderUnusable):
            run.manager.load()
        other.unlink()
        assert not run.manager.load()
        run.step()
        run.manager.wait()
    with run_of(tmp_path / "run", other, timeout_seconds=3) as run:
        shutil.rmtree(other)
        other.write_text("no folder")
        assert run.manager.load()
        run.train(3)
        assert run.committed() == [1, 2, 3]
        run.events.wait_for("upload_failed")
    assert "continuing with step 1" in caplog.text
    assert "Not yet uploaded to" in caplog.text
    assert "torchtitan-lite upload" in caplog.text


@pytest.mark.slow
def test_a_folder_of_another_run_ends_the_uploads_and_the_saves_continue(tmp_path: Path, other: Path) -> None:
    first = SmallRun(tmp_path / "first", interval=1).loaded().finished(2)
    SmallRun(tmp_path / "run", interval=1).loaded().finished(1)
    with (
        pytest.raises(UploadRefused, match="checkpoints of another run, "),
        run_of(tmp_path / "run", first.root) as run,
    ):
        assert run.manager.load()
        assert run.train_state.step == 1
        run.train(3)
        assert run.committed() == [1, 2, 3]
    assert len(run.events.steps("uploads_ended")) == 1
    assert steps_in(first.root) == [1, 2]


@pytest.mark.slow
def test_a_folder_that_another_run_uploads_to_is_left_to_it(tmp_path: Path, other: Path) -> None:
    with run_of(tmp_path / "first", other).loaded() as first:
        first.step()
        while not first.events.steps("uploaded"):
            first.manager.wait()
        SmallRun(tmp_path / "second", interval=1).loaded().finished(1)
        with pytest.raises(UploadRefused, match="in use by"), run_of(tmp_path / "second", other) as second:
            second.manager.load()
            second.train(3)
        assert second.committed() == [1, 2, 3]
        first.train(2)
    assert steps_in(other) == [1, 2]


def test_a_full_folder_fails_the_upload_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "small", 1 << 16) as full, run_of(tmp_path / "run", full, timeout_seconds=3) as run:
        run.manager.load()
        run.train(2)
        assert run.committed() == [1, 2]
        run.events.wait_for("upload_failed")
    assert "No space left on device" in run.events.figures("upload_failed")["reason"]
    assert sum(message.startswith("Not yet uploaded to") for message in caplog.messages) == 1


@pytest.mark.slow
def test_an_error_of_the_loop_waits_for_no_upload(tmp_path: Path, other: Path) -> None:
    with pytest.raises(ZeroDivisionError), run_of(tmp_path / "run", other, upload_max_mb_per_second=1e-6) as run:
        run.manager.load()
        run.step()
        run.step()
        raise ZeroDivisionError
    assert steps_in(run.root) == [1, 2]
    run = run_of(tmp_path / "run", other).resumed().finished(3)
    assert steps_in(other) == [1, 2, 3]


@pytest.mark.slow
def test_retention_leaves_the_step_that_is_being_uploaded(tmp_path: Path, other: Path) -> None:
    with run_of(tmp_path / "run", other, keep_latest_k=1).loaded() as run:
        run.step()
        begun = record.Begun((1, "abc", 1.0), "step-1.staging")
        while not run.events.steps("uploaded"):
            run.step()
    # The process that writes it has ended.
    record.write_record(run.root, record.Record(str(other), "id", begun))
    assert uploads_of(run.manager).protected() == {1}
    record.write_record(run.root, record.Record(str(other)))
    assert uploads_of(run.manager).protected() == frozenset()


def test_a_folder_is_not_uploaded_into_itself(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.upload_folder"):
        Checkpoint(upload_folder="checkpoint")
    with pytest.raises(ConfigError, match=r"checkpoint\.upload_folder.*object store"):
        Checkpoint(folder="s3://bucket/run", upload_folder="s3://bucket/other")
    with run_of(tmp_path / "run", "x/../checkpoint") as run, pytest.raises(ConfigError, match="upload_folder"):
        run.manager.load()


def test_a_start_that_only_loads_looks_there_and_uploads_nothing(tmp_path: Path, other: Path) -> None:
    run_of(tmp_path / "run", other).loaded().finished(2)
    shutil.rmtree(tmp_path / "run")
    with run_of(tmp_path / "run", other, load_only=True).resumed() as run:
        assert run.train_state.step == 2
    assert not run.root.exists()


@pytest.mark.slow
def test_what_a_roll_back_left_is_not_loaded_from_there(tmp_path: Path, other: Path) -> None:
    run_of(tmp_path / "run", other).loaded().finished(6)
    # The branch is cut before its first step is uploaded.
    with pytest.raises(ZeroDivisionError), run_of(tmp_path / "run", other, load_step=2, **SLOW) as run:
        run.manager.load()
        run.step()
        run.manager.wait()
        expected = run.contents()
        raise ZeroDivisionError
    assert steps_in(other) == [1, 2, 3, 4, 5, 6]
    with run_of(tmp_path / "run", other).loaded() as run:
        assert same(run.contents(), expected)
        run.train(5)
    assert steps_in(other) == steps_in(run.root) == [1, 2, 3, 4, 5]


SLOW = {"upload_max_mb_per_second": 1e-6}


@pytest.mark.slow
def test_a_disk_that_missed_a_roll_back_elsewhere_is_left_behind(tmp_path: Path, other: Path) -> None:
    run_of(tmp_path / "first", other).loaded().finished(6)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    with run_of(tmp_path / "second", other, load_step=2).loaded() as run:
        run.train(4)
        expected = run.contents()
    with run_of(tmp_path / "first", other).loaded() as run:
        assert same(run.contents(), expected)
        run.train(5)
    assert steps_in(tmp_path / "first" / "checkpoint") == [1, 2, 5]


@pytest.mark.slow
def test_a_step_that_only_that_folder_has_can_be_named(tmp_path: Path, other: Path) -> None:
    run_of(tmp_path / "run", other).loaded().finished(4)
    shutil.rmtree(tmp_path / "run")
    with run_of(tmp_path / "run", other, load_step=2).loaded() as run:
        assert run.train_state.step == 2
        run.train(3)
    assert steps_in(other) == [1, 2, 3]
    shutil.rmtree(tmp_path / "run")
    with run_of(tmp_path / "run", other, load_step=2).loaded() as run:
        assert run.train_state.step == 3


@pytest.mark.parametrize("is_passed", [True, False])
def test_a_named_step_that_only_that_folder_has_and_that_is_damaged_ends_the_load(
    tmp_path: Path, is_passed: bool
) -> None:
    there = SmallRun(tmp_path / "there", interval=1).loaded().finished(2).root
    flip(there / "step-1" / "__0_0.distcp")
    with run_of(tmp_path / "run", there, load_step=-1 if is_passed else 1) as run:
        sources, dropped = run.manager._load.sources, list[int]()
        drop = sources.drop

        def drop_once(source: LoadSource, error: CheckpointError) -> bool:
            assert not dropped, "the same step was loaded again"
            dropped.append(source.step)
            return drop(source, error)

        sources.drop = drop_once  # type: ignore[method-assign]  # else a load that never ends
        with pytest.raises(CheckpointDamaged, match="step-1"):
            run.manager.load(1 if is_passed else -1)


@pytest.mark.slow
def test_a_tool_that_has_the_folder_for_a_moment_delays_the_uploads_alone(tmp_path: Path, other: Path) -> None:
    lease = CheckpointStore(other).lease("tool", 30.0)
    lease.take()
    with run_of(tmp_path / "run", other).loaded() as run:
        run.step()
        while not run.events.steps("upload_failed"):
            run.manager.wait()
        lease.release()
        while not run.events.steps("uploaded"):
            run.manager.wait()
        run.train(2)
    assert steps_in(other) == [1, 2]


@pytest.mark.slow
def test_a_step_that_is_saved_again_during_its_upload_is_sent_as_it_is_then(tmp_path: Path, other: Path) -> None:
    run = run_of(tmp_path / "run", other).loaded().finished(2)
    run = run_of(tmp_path / "run", other, load_step=1).loaded().finished(2)
    there, here = CheckpointStore(other).committed(), CheckpointStore(run.root).committed()
    assert [(info.step, info.run_id, info.created_at) for info in there] == [
        (info.step, info.run_id, info.created_at) for info in here
    ]
