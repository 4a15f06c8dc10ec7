"""Asynchronous modes purge in the background: training does not wait, and only old checkpoints are removed."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from tests.checkpoint.conftest import StartRun
from tests.store import filled
from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.disk.threads import Background
from torchtitan_lite.errors import LeaseLost
from torchtitan_lite.events import ignore
from torchtitan_lite.store.housekeeping import Housekeeping
from torchtitan_lite.store.retention import KeepLatest
from torchtitan_lite.store.store import CheckpointStore

DEADLINE_SECONDS = 30.0


class HeldDisk(Durable):
    """Removes folders only after `let_go` is set."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.in_time = True

    def remove_tree(self, path: Path) -> None:
        self.in_time &= self.let_go.wait(DEADLINE_SECONDS)
        super().remove_tree(path)


def save(store: CheckpointStore, step: int, created_at: float = 1.0) -> None:
    filled.commit(store, step, created_at=created_at, files={})


@pytest.mark.promise("In the asynchronous modes a slow removal blocks neither training nor a save.", section="kept")
@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_training_and_saves_continue_during_a_removal_that_takes_long(
    start_run: StartRun, tmp_path: Path, mode: str
) -> None:
    disk = HeldDisk()
    store = CheckpointStore(tmp_path / "checkpoint", durable=disk)
    run = start_run(interval=1, keep_latest_k=2, async_mode=mode, seams={"store": store})
    for _ in range(6):
        run.step()
    assert run.events.steps("committed") >= [1, 2, 3, 4, 5]
    assert run.events.steps("purged") == []
    disk.let_go.set()
    run.manager.close()
    assert run.committed() == [5, 6]
    assert run.events.steps("purged") == [1, 2, 3, 4]
    assert run.names() == ["step-5", "step-6"]
    assert disk.in_time


def test_closing_waits_for_a_removal_no_longer_than_it_may(
    start_run: StartRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = HeldDisk()
    store = CheckpointStore(tmp_path / "checkpoint", durable=disk)
    run = start_run(interval=1, keep_latest_k=1, async_mode="async", timeout_seconds=3, seams={"store": store})
    for _ in range(3):
        run.step()
    run.manager.close()
    assert "still being removed after 3 s; the next start removes the rest" in caplog.text
    assert not disk.let_go.is_set()
    disk.let_go.set()
    # It removes no further ones: the folder may belong to another job by now.
    assert run.manager._housekeeping.wait(DEADLINE_SECONDS)
    assert run.committed() == [2, 3]
    with start_run(interval=1, keep_latest_k=1).resumed() as again:
        assert again.names() == ["step-2", "step-3"]


def test_a_step_that_was_saved_again_in_between_stays(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    before = store.get(1)
    save(store, 1, created_at=2.0)
    assert store.discard(before) == []
    assert store.get(1).created_at == 2.0


def test_once_the_folder_is_lost_nothing_is_removed(tmp_path: Path) -> None:
    def lost() -> None:
        raise LeaseLost(str(tmp_path), "another job")

    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        save(store, step)
    store.check_lease = lost  # type: ignore[method-assign]
    Housekeeping(KeepLatest(1), ignore).purge(store)
    assert [info.step for info in store.committed()] == [1, 2]


def test_work_that_exits_holds_neither_the_work_after_it_nor_who_waits(caplog: pytest.LogCaptureFixture) -> None:
    background, ran = Background("test"), list[str]()
    background.run("a", lambda: sys.exit("no"))
    background.run("b", lambda: ran.append("b"))
    assert background.wait(3.0)
    assert ran == ["b"] and "Background task test failed: SystemExit: no" in caplog.text


def test_queued_work_of_one_key_runs_once_and_all_work_in_order() -> None:
    background, begun, may_continue, ran = Background("test"), threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        begun.set()
        assert may_continue.wait(DEADLINE_SECONDS)
        ran.append("first")

    background.run("a", first)
    assert begun.wait(DEADLINE_SECONDS)
    for name in ("second", "third"):
        background.run("b", lambda name=name: ran.append(name))  # type: ignore[misc]  # mypy wants one type of lambda
    assert not background.wait(0)
    may_continue.set()
    assert background.wait(DEADLINE_SECONDS)
    assert ran == ["first", "third"]


def test_work_that_had_not_begun_when_it_was_closed_never_does() -> None:
    background, begun, may_continue, ran = Background("test"), threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        begun.set()
        assert may_continue.wait(DEADLINE_SECONDS)

    background.run("a", first)
    assert begun.wait(DEADLINE_SECONDS)
    background.run("b", lambda: ran.append("b"))
    assert not background.close(0)
    may_continue.set()
    assert background.wait(DEADLINE_SECONDS)
    assert ran == []
