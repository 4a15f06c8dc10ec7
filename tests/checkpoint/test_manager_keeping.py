"""What the manager holds while it is open and lets go of at its end, and what it remembers from save to save."""

from __future__ import annotations

import json
import logging
import signal
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.small_run import SmallRun
from tests.clock import Clock
from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.saving.savers import PendingSave, SyncSaver
from torchtitan_lite.checkpoint.saving.target import SaveTarget
from torchtitan_lite.checkpoint.schedule.preemption import PreemptionWatch
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import FolderInUse
from torchtitan_lite.store import layout
from torchtitan_lite.store.lease import Lease
from torchtitan_lite.store.manifest import Manifest

DATA = layout.data_file(0, 0)
TIMEOUT = timedelta(seconds=60)


def lineage(run: SmallRun, step: int) -> tuple[str, int | None]:
    """Return the run id and the parent step in the manifest of `step`."""
    manifest = Manifest.of_folder(run.root / layout.step_dir(step))
    assert manifest is not None
    return manifest.lineage.run_id, manifest.lineage.parent_step


class Notes(PreemptionWatch):
    """Watches nothing, and records each call."""

    def __init__(self, received: int = 0) -> None:
        super().__init__((), grace_seconds=60)
        self._received = received
        self.noted: list[str] = []

    def start(self) -> None:
        self.noted.append("start")

    def leave(self) -> None:
        self.noted.append("leave")

    def close(self) -> None:
        self.noted.append("close")


class StuckSaver(SyncSaver):
    """Its saves become durable when the test says so; one that is not `staged` becomes it when a caller waits."""

    def __init__(self, *, staged: bool = True) -> None:
        super().__init__(Peers(TIMEOUT))
        self.durable: Future[Any] = Future()
        self.num_waits = 0
        self._staged = staged

    def save(self, state: State, target: SaveTarget) -> PendingSave:
        staged: Future[None] = Future()
        wait = staged.result

        def waited(timeout: float | None = None) -> None:
            self.num_waits += 1
            staged.set_result(None)
            wait(timeout)

        if self._staged:
            staged.set_result(None)
        else:
            staged.result = waited  # type: ignore[method-assign]  # to see who waits
        return PendingSave(target.step, staged, self.durable)


class NotingSaver(SyncSaver):
    """Notes when it is started and closed."""

    def __init__(self) -> None:
        super().__init__(Peers(TIMEOUT))
        self.noted: list[str] = []

    def start(self) -> None:
        self.noted.append("start")

    def close(self, timeout_seconds: float) -> None:
        self.noted.append(f"close within {timeout_seconds:.0f} s")


def opened_by_open(run: SmallRun) -> None:
    run.manager.open()


def opened_by_load(run: SmallRun) -> None:
    run.manager.load()


def opened_by_save(run: SmallRun) -> None:
    run.manager.save(1)


def opened_by_reset(run: SmallRun) -> None:
    run.manager.reset()


def opened_by_looking(run: SmallRun) -> None:
    run.manager.latest_step()


@pytest.mark.parametrize(
    "open_it", [opened_by_open, opened_by_load, opened_by_save, opened_by_reset, opened_by_looking]
)
def test_whatever_comes_first_takes_the_folders_and_closing_frees_them(
    start_run: StartRun, tmp_path: Path, open_it: Any
) -> None:
    watch, saver = Notes(), NotingSaver()
    run = start_run(interval=9, export_folder="export", seams={"preemption": watch, "saver": saver}, timeout_seconds=33)
    locks = [run.root / layout.LOCK, tmp_path / "export" / layout.LOCK]
    assert not any(lock.exists() for lock in locks)
    open_it(run)
    assert all(lock.exists() for lock in locks)
    assert watch.noted[:1] == ["start"]
    started = ["start"] if open_it in (opened_by_save, opened_by_reset) else []
    assert saver.noted == started, "the saver starts during the first step, not during a load"
    run.manager.close()
    assert not any(lock.exists() for lock in locks)
    assert (watch.noted[-1], saver.noted) == ("close", [*started, "close within 33 s"])
    run.manager.close()
    assert saver.noted == [*started, "close within 33 s"]


def test_where_one_folder_is_another_jobs_nothing_stays_open(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Lease.take

    def take_but_the_second(lease: Lease) -> None:
        if taken:
            raise FolderInUse("export", "another job")
        taken.append(lease)
        take(lease)

    taken: list[Lease] = []
    monkeypatch.setattr(Lease, "take", take_but_the_second)
    watch = Notes()
    run = start_run(export_folder="export", seams={"preemption": watch})
    with pytest.raises(FolderInUse):
        run.manager.open()
    assert watch.noted == ["start", "close"]
    assert not list(run.root.parent.glob(f"*/{layout.LOCK}"))


def test_a_run_that_only_loads_takes_no_folder(start_run: StartRun) -> None:
    run = start_run(interval=1)
    run.step()
    run.manager.close()
    start_run(load_only=True).resumed()
    assert not (run.root / layout.LOCK).exists()


def test_an_optimizer_waits_for_the_copy_by_itself(start_run: StartRun) -> None:
    saver = StuckSaver(staged=False)
    run = start_run(interval=1, seams={"saver": saver})
    assert run.step()
    assert saver.num_waits == 0
    run.optimizer.step()
    assert saver.num_waits == 1
    run.optimizer.step()
    assert saver.num_waits == 1, "it is made by now"
    saver.durable.set_result(None)


def test_checkpoints_of_a_run_and_its_restarts_follow_one_another(start_run: StartRun) -> None:
    run = start_run(interval=2).finished(4)
    start_run(interval=1).loaded().finished(6)
    run_id, parent = lineage(run, 2)
    assert parent is None
    assert [lineage(run, step) for step in (4, 5, 6)] == [(run_id, 2), (run_id, 4), (run_id, 5)]
    fresh = start_run(run.root.parent / "other", interval=1)
    fresh.step()
    assert lineage(fresh, 1)[0] != run_id


def test_a_checkpoint_that_was_loaded_stays_until_a_newer_one_is_durable_however_few_are_kept(
    start_run: StartRun,
) -> None:
    """What lies next to it was not seen to be good."""
    run = start_run(interval=1).finished(3)
    (run.root / "step-3" / DATA).write_bytes(b"cut")
    again = start_run(interval=1, keep_latest_k=1).loaded()
    assert again.manager.loaded_step == 2
    again.step()
    again.manager.close()
    assert again.committed() == [3]
    assert again.names() == ["step-3", "step-3.corrupt"]


def test_the_latest_step_is_one_whose_files_are_all_there(start_run: StartRun) -> None:
    run = start_run(interval=1)
    run.train(3)
    assert run.manager.latest_step() == 3
    (run.root / "step-3" / DATA).write_bytes(b"cut")
    assert run.manager.latest_step() == 2


def test_a_save_that_was_left_out_counts_for_the_clock(start_run: StartRun) -> None:
    """Else it would be due again at every step until the one before it is done."""

    stuck = StuckSaver()
    run = start_run(interval=10, interval_type="seconds", when_busy="skip", seams={"saver": stuck})
    run.manager.reset()
    for _ in range(12):
        run.clock.seconds += 5
        run.step()
    assert run.events.steps("save_started") == [3]
    assert run.events.steps("save_skipped") == [6, 9, 12]
    stuck.durable.set_result(None)


def test_a_signal_before_training_is_logged_and_saves_nothing(
    start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run(interval=1).finished(2)
    for folder, step in ((run.root.parent, 2), (run.root.parent / "fresh", 0)):
        watch = Notes(received=signal.SIGTERM)
        again = start_run(folder, seams={"preemption": watch})
        with caplog.at_level(logging.INFO, "torchtitan_lite"):
            again.manager.load()
        assert again.manager.preempted_by == signal.SIGTERM
        assert watch.noted == ["start", "leave"]
        assert again.events.figures("preempted") == {"signal": signal.SIGTERM, "given_up_steps": 0}
        assert again.events.steps("preempted") == [step]
        assert f"Trained nothing after step {step}; leaving for SIGTERM" in caplog.text


def test_a_load_that_no_signal_came_to_leaves_for_none(start_run: StartRun) -> None:
    watch = Notes()
    run = start_run(seams={"preemption": watch}).loaded()
    assert (run.manager.preempted_by, watch.noted) == (0, ["start"])
    assert run.events.steps("preempted") == []


class SlowState:
    """Takes its time to be loaded."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._clock is not None:
            self._clock.seconds += 2.5


def test_a_load_reports_its_checkpoint_bytes_and_seconds(start_run: StartRun) -> None:
    run = start_run(interval=1, states={"slow": SlowState()}).finished(1)
    nbytes = sum(path.stat().st_size for path in (run.root / "step-1").iterdir() if path.name != layout.MANIFEST)
    clock = Clock()
    again = start_run(states={"slow": SlowState(clock)}, seams={"clock": clock}).loaded()
    path, nothing_at_risk = str(run.root / "step-1"), {"at_risk_steps": 0, "at_risk_seconds": 0.0}
    reported = [(name, step, figures) for name, step, figures in again.events.recorded if name.startswith("load")]
    assert reported == [
        ("load_started", 1, {"path": path, "origin": "disk"}),
        ("loaded", 1, {"path": path, "seconds": 2.5, "bytes": nbytes, "origin": "disk", **nothing_at_risk}),
    ]


def test_the_manifest_says_topology_and_config_of_the_run(start_run: StartRun) -> None:
    for topology in (None, "dp_shard 1"):
        run = start_run(interval=1, seams={"topology": topology}).loaded()
        run.step()
        document = json.loads((run.root / f"step-{run.train_state.step}" / layout.MANIFEST).read_bytes())
        assert document["extra"]["topology"] == (topology or "1 ranks")
        assert document["extra"]["config"]["checkpoint"]["interval"] == 1
        assert document["world_size"] == 1
        run.manager.close()


def test_the_log_says_when_a_periodic_save_begins_and_what_is_deleted(
    start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "torchtitan_lite"):
        start_run(interval=1, keep_latest_k=1).train(3)
    said = [line for line in caplog.messages if line.startswith(("Saving", "Deleted"))]
    last = "Saving a full checkpoint at last step, step 3."
    assert said == ["Saving step 1", "Saving step 2", "Deleted step 1", last, "Deleted step 2"]
