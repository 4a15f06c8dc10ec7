"""What is uploaded into another folder is what was committed, complete or not at all."""

from __future__ import annotations

import dataclasses
import filecmp
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.checkpoint.small_run import SmallRun
from tests.disks import fill, make_read_only, small_disk
from tests.store.filled import flip
from tests.uploading.runs import run_of, steps_in
from torchtitan_lite.disk.helper import Rate
from torchtitan_lite.errors import CheckpointError, FolderInUse, UploadRefused
from torchtitan_lite.events import Event
from torchtitan_lite.store import layout
from torchtitan_lite.store.retention import KeepLatest
from torchtitan_lite.store.store import CheckpointStore
from torchtitan_lite.uploading import record
from torchtitan_lite.uploading.uploader import State, Uploader, UploadJob, upload_all


def trained(folder: Path, steps: int = 3, **config: object) -> Path:
    SmallRun(folder, interval=1, **config).loaded().finished(steps)
    return folder / "checkpoint"


def job(folder: Path, target: Path, **changes: object) -> UploadJob:
    return dataclasses.replace(UploadJob(str(folder), str(target)), **changes)  # type: ignore[arg-type]  # its fields


@contextmanager
def opened(job: UploadJob, states: list[State], events: list[Event] | None = None) -> Iterator[Uploader]:
    uploader = Uploader(job, states.append, (events if events is not None else []).append)
    uploader.open()
    try:
        yield uploader
    finally:
        uploader.close()


def test_a_copy_has_the_same_files_and_loads(tmp_path: Path) -> None:
    source = trained(tmp_path / "run")
    assert upload_all(job(source, tmp_path / "other" / "checkpoint"), lambda state: None) == 3
    for name in ("__0_0.distcp", ".metadata", "manifest.json"):
        assert filecmp.cmp(source / "step-3" / name, tmp_path / "other/checkpoint/step-3" / name, shallow=False)
    with SmallRun(tmp_path / "other").resumed() as again:
        assert again.train_state.step == 3


def test_another_run_that_had_committed_nothing_when_it_took_the_folder_is_refused(tmp_path: Path) -> None:
    upload_all(job(trained(tmp_path / "first", 1), tmp_path / "other"), lambda state: None)
    (tmp_path / "second" / "checkpoint").mkdir(parents=True)
    with opened(job(tmp_path / "second" / "checkpoint", tmp_path / "other"), []) as uploader:
        assert uploader.next() is None
        trained(tmp_path / "second", 2)
        with pytest.raises(UploadRefused, match="checkpoints of another run, "):
            uploader.next()
    assert steps_in(tmp_path / "other") == [1]


def test_nothing_is_sent_twice(tmp_path: Path) -> None:
    source, states = trained(tmp_path / "run"), list[State]()
    upload_all(job(source, tmp_path / "other"), lambda state: None)
    assert upload_all(job(source, tmp_path / "other"), states.append) == 0
    assert states[-1].sent_bytes == 0


def test_an_upload_that_was_cut_continues_with_the_files_that_are_missing(tmp_path: Path) -> None:
    source, states = trained(tmp_path / "run", 1), list[State]()
    work = job(source, tmp_path / "other")
    total = sum(path.stat().st_size for path in (source / "step-1").iterdir() if path.name != "manifest.json")
    with opened(work, states) as uploader, pytest.raises(KeyboardInterrupt):
        info = uploader.next()
        assert info is not None
        written: list[int] = []

        def cut_in_the_second_file(state: State) -> None:
            written.append(state.sent_bytes)
            if len(record.read(source, str(tmp_path / "other")).begun.done) == 1 and state.sent_bytes > written[0]:  # type: ignore[union-attr]
                raise KeyboardInterrupt

        uploader._report = cut_in_the_second_file
        uploader.upload(info)
    begun = record.read(source, str(tmp_path / "other")).begun
    assert begun is not None
    assert len(begun.done) == 1
    assert steps_in(tmp_path / "other") == []
    assert upload_all(work, states.append) == 1
    assert states[-1].sent_bytes == total - sum(begun.done.values())
    assert steps_in(tmp_path / "other") == [1]
    assert record.read(source, str(tmp_path / "other")).begun is None


def test_a_damaged_checkpoint_is_not_uploaded_and_the_others_are(tmp_path: Path) -> None:
    source = trained(tmp_path / "run")
    flip(source / "step-2" / "__0_0.distcp", 100)
    with pytest.raises(CheckpointError, match=r"step-2.*__0_0\.distcp.*digest"):
        upload_all(job(source, tmp_path / "other"), lambda state: None)
    assert steps_in(tmp_path / "other") == [1, 3]


def test_a_step_that_is_removed_during_its_upload_is_left(tmp_path: Path) -> None:
    source, states = trained(tmp_path / "run"), list[State]()
    with opened(job(source, tmp_path / "other"), states) as uploader:
        info = uploader.next()
        assert info is not None
        store = CheckpointStore(source)
        store.empty(store.discard(info))
        uploader.upload(info)
        assert steps_in(tmp_path / "other") == []
        assert (after := uploader.next()) is not None
        assert after.step == 2


def test_what_the_rules_remove_on_disk_they_remove_there(tmp_path: Path) -> None:
    source = trained(tmp_path / "run", 2)
    work = job(source, tmp_path / "other", retention=KeepLatest(1))
    assert upload_all(work, lambda state: None) == 1
    SmallRun(tmp_path / "run", interval=1).loaded().finished(3)
    assert upload_all(work, lambda state: None) == 1
    assert steps_in(tmp_path / "other") == [3]


@pytest.mark.parametrize("refuse", [fill, make_read_only])
def test_a_disk_that_takes_nothing_more_is_uploaded(
    tmp_path: Path, refuse: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        source = trained(disk / "run")
        refuse(disk)
        work = job(source, tmp_path / "other")
        assert upload_all(work, lambda state: None) == 3
        assert upload_all(work, lambda state: None) == 0
    assert steps_in(tmp_path / "other") == [1, 2, 3]
    assert (
        sum("An interrupted upload starts again" in message for message in caplog.messages) == 2
    )  # Once for each call.


def test_a_run_whose_disk_is_full_still_uploads_what_is_on_it(tmp_path: Path, other: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        with run_of(disk / "run", "").loaded() as run:
            run.train(2)
        with run_of(disk / "run", other).loaded() as run:
            fill(disk)
            run.manager.reset()
            run.events.wait_for("uploaded")
    assert steps_in(other) == [1, 2]


def test_a_folder_of_another_run_is_refused_and_unchanged(tmp_path: Path) -> None:
    source, other = trained(tmp_path / "run"), trained(tmp_path / "other", 2)
    with pytest.raises(UploadRefused, match=r"it has checkpoints of another run, .*upload_folder"):
        upload_all(job(source, other), lambda state: None)
    assert steps_in(other) == [1, 2]
    assert not (other / layout.LOCK).exists()


def test_a_folder_that_a_job_writes_is_refused(tmp_path: Path) -> None:
    source = trained(tmp_path / "run")
    with SmallRun(tmp_path / "other", interval=1).loaded() as run:
        run.step()
        with pytest.raises((FolderInUse, UploadRefused)):
            upload_all(job(source, run.root, lease_timeout_seconds=10.0), lambda state: None)


def test_a_roll_back_abandons_there_what_it_abandons_here(tmp_path: Path) -> None:
    source = trained(tmp_path / "run", 4)
    work = job(source, tmp_path / "other", retention=KeepLatest(1))
    upload_all(work, lambda state: None)
    SmallRun(tmp_path / "run", interval=1, load_step=2, keep_latest_k=1).loaded().finished(4)
    SmallRun(tmp_path / "run", interval=1, load_step=2, keep_latest_k=1).loaded().finished(5)
    upload_all(work, lambda state: None)
    assert steps_in(tmp_path / "other") == [5]
    assert [info.run_id for info in CheckpointStore(tmp_path / "other").committed()] == [
        info.run_id for info in CheckpointStore(source).committed()
    ]


def test_what_the_run_there_has_left_is_not_sent_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = trained(tmp_path / "run", 4)
    shutil.copytree(tmp_path / "run", tmp_path / "new")
    upload_all(job(trained(tmp_path / "new", 3, load_step=2), tmp_path / "other"), lambda state: None)
    assert upload_all(job(source, tmp_path / "other"), lambda state: None) == 0
    assert f"Not uploaded, because a later checkpoint in {tmp_path / 'other'} abandons it: step 3, 4" in caplog.messages


def test_the_limit_is_kept_on_average_without_a_burst_after_a_pause() -> None:
    now, slept = 100.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    rate = Rate(10.0, clock=lambda: now, sleep=sleep)
    for _ in range(3):
        rate.wait_for(20)
    assert slept == [2.0, 2.0]
    now += 60.0
    rate.wait_for(20)
    rate.wait_for(20)
    assert slept == [2.0, 2.0, 2.0]
