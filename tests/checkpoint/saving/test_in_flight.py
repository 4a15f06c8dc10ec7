"""The save in flight: when it is settled, what is counted, what is kept."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.small_run import ORIGIN, Events
from tests.clock import Clock
from tests.disks import FailingDisk
from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.saving.in_flight import InFlightSave
from torchtitan_lite.checkpoint.saving.savers import PendingSave, SyncSaver
from torchtitan_lite.checkpoint.saving.target import SaveTarget
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.disk.durable import DISK, Durable
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import LeaseLost, SaveFailed
from torchtitan_lite.events import ignore
from torchtitan_lite.store.housekeeping import Housekeeping
from torchtitan_lite.store.manifest import CheckpointKind
from torchtitan_lite.store.retention import KeepAll, KeepLatest, RetentionPolicy
from torchtitan_lite.store.store import CheckpointStore

PEERS = Peers(timedelta(seconds=60))


class HeldSaver(SyncSaver):
    """Saves once the test calls `complete`."""

    def __init__(self) -> None:
        super().__init__(PEERS)
        self.staged: Future[None] = Future()
        self.durable: Future[Any] = Future()
        self._save: Callable[[], PendingSave] | None = None

    def save(self, state: State, target: SaveTarget) -> PendingSave:
        self.staged, self.durable = Future(), Future()
        self._save = lambda: SyncSaver.save(self, state, target)
        return PendingSave(target.step, self.staged, self.durable)

    def complete(self) -> None:
        """Make the save that was begun."""
        assert self._save is not None
        durable = self._save().durable
        failure = durable.exception()
        if failure is None:
            self.durable.set_result(durable.result())
        else:
            self.durable.set_exception(failure)


def begin(
    in_flight: InFlightSave,
    step: int,
    store: CheckpointStore,
    save: Callable[[SaveTarget], PendingSave],
    kind: CheckpointKind = CheckpointKind.FULL,
) -> None:
    target = in_flight.begin(step, kind, store, ORIGIN)
    in_flight.follow(target, save(target))


class Case:
    """An `InFlightSave` and its collaborators."""

    def __init__(self, root: Path, retention: RetentionPolicy | None = None, max_failed_saves: int = 3) -> None:
        self.root, self.events, self.clock, self.saver = root, Events(), Clock(), HeldSaver()
        context = RunContext(Checkpoint(max_failed_saves=max_failed_saves), PEERS, self.clock, self.events.emit)
        self.in_flight = InFlightSave(Housekeeping(retention or KeepAll(), self.events.emit), context)

    def begin(self, step: int, durable: Durable = DISK, kind: CheckpointKind = CheckpointKind.FULL) -> None:
        store = CheckpointStore(self.root, durable=durable)
        begin(self.in_flight, step, store, partial(self.saver.save, {"weight": torch.ones(3)}), kind)

    def save(self, step: int, durable: Durable = DISK, kind: CheckpointKind = CheckpointKind.FULL) -> SaveFailed | None:
        self.begin(step, durable, kind)
        self.saver.complete()
        return self.in_flight.settle()

    def names(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def test_a_save_that_is_not_durable_yet_is_not_reported(root: Path) -> None:
    case = Case(root)
    case.begin(1)
    case.in_flight.poll()
    assert [name for name, *_ in case.events.recorded] == ["save_started", "staged"]
    case.saver.complete()
    case.in_flight.poll()
    assert case.events.steps("committed") == [1]


def test_a_durable_save_is_reported_with_its_bytes_and_seconds(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(root)
    case.begin(1)
    case.clock.seconds += 2.5
    case.saver.complete()
    case.clock.seconds += 100
    with caplog.at_level(logging.INFO, "torchtitan_lite"):
        case.in_flight.poll()
    figures = case.events.figures("committed")
    assert figures["bytes"] == CheckpointStore(root).get(1).nbytes
    assert (figures["kind"], figures["seconds"], figures["stall_seconds"]) == ("full", 2.5, 0.0)
    assert "Saved step 1: " in caplog.text
    assert "KiB in 2.50 s (blocked 0.000 s)" in caplog.text


def test_waiting_for_staging_counts_as_blocked_time(root: Path) -> None:
    case = Case(root)
    case.begin(1)
    wait = case.saver.staged.result

    def waited(timeout: float | None = None) -> None:
        case.clock.seconds += 4
        case.saver.staged.set_result(None)
        wait(timeout)

    case.saver.staged.result = waited  # type: ignore[method-assign]  # time passes while a thread waits
    case.in_flight.wait_for_staging()
    case.in_flight.wait_for_staging()
    case.saver.complete()
    case.in_flight.settle()
    assert case.events.figures("committed")["stall_seconds"] == 4


def test_with_nothing_in_flight_there_is_nothing_to_wait_for(root: Path) -> None:
    case = Case(root)
    case.in_flight.wait_for_staging()
    case.in_flight.poll()
    assert case.in_flight.settle() is None
    assert not case.in_flight.failed


def test_a_failure_waits_until_the_ranks_agreed_on_it(root: Path) -> None:
    case = Case(root)
    case.begin(1, FailingDisk("rename"))
    case.saver.complete()
    assert case.in_flight.failed
    case.in_flight.poll()
    assert case.events.steps("save_failed") == []
    failure = case.in_flight.settle()
    assert isinstance(failure, SaveFailed)
    assert str(failure) == str(case.saver.durable.exception())
    assert case.events.steps("save_failed") == [1]
    assert not case.in_flight.failed


def test_what_a_failed_save_left_is_removed(root: Path) -> None:
    case = Case(root)
    case.save(1, FailingDisk("rename"))
    assert case.names() == []


def test_leftovers_that_cannot_be_removed_are_a_warning(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(root)
    case.save(1, FailingDisk("rename", "remove_tree"))
    assert "Could not remove what the failed save of step 1 left" in caplog.text
    assert case.save(1) is None
    CheckpointStore(root).recover()
    assert case.names() == ["step-1"]


def test_too_many_failures_in_a_row_are_an_error_and_a_success_resets_their_number(root: Path) -> None:
    case = Case(root, max_failed_saves=2)
    assert case.save(1, FailingDisk("rename")) is not None
    assert case.save(2) is None
    assert case.save(3, FailingDisk("rename")) is not None
    with pytest.raises(SaveFailed, match="the save of step 4 failed"):
        case.save(4, FailingDisk("rename"))
    assert [figures["in_a_row"] for name, _, figures in case.events.recorded if name == "save_failed"] == [1, 1, 2]


def test_an_outcome_is_returned_however_many_failed_in_a_row(root: Path) -> None:
    case = Case(root, max_failed_saves=1)
    case.begin(1, FailingDisk("rename"))
    case.saver.complete()
    assert isinstance(case.in_flight.outcome(), SaveFailed)
    assert case.events.steps("save_failed") == [1]


def test_a_save_that_is_not_durable_in_time_failed(root: Path) -> None:
    events = Events()
    housekeeping = Housekeeping(KeepAll(), events.emit)
    in_flight = InFlightSave(housekeeping, RunContext(Checkpoint(timeout_seconds=1), PEERS, Clock(), events.emit))
    begin(in_flight, 1, CheckpointStore(root), partial(HeldSaver().save, {}))
    failure = in_flight.settle()
    assert failure is not None
    assert "not durable after 1 s (checkpoint.timeout_seconds)" in failure.cause


def test_a_copy_that_is_not_made_in_time_is_an_error(root: Path) -> None:
    context = RunContext(Checkpoint(timeout_seconds=1), PEERS, Clock(), ignore)
    in_flight = InFlightSave(Housekeeping(KeepAll(), ignore), context)
    begin(in_flight, 1, CheckpointStore(root), partial(HeldSaver().save, {}))
    with pytest.raises(SaveFailed, match=r"not staged after 1 s \(checkpoint.timeout_seconds\)"):
        in_flight.wait_for_staging()


@pytest.mark.promise("Nothing is removed before the newer checkpoint is durable.", section="kept")
def test_purge_waits_until_the_new_checkpoint_is_durable(root: Path) -> None:
    case = Case(root, KeepLatest(1))
    case.save(1)
    case.begin(2)
    assert case.names() == ["step-1"]
    case.saver.complete()
    assert case.names() == ["step-2"]
    assert case.events.steps("purged") == [1]


def test_a_failed_save_purges_nothing(root: Path) -> None:
    case = Case(root, KeepLatest(1))
    case.save(1)
    case.save(2, FailingDisk("rename"))
    assert case.names() == ["step-1"]


def test_a_deletion_that_fails_is_a_warning_and_later_ones_still_happen(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(root, KeepAll())
    for step in (1, 2, 3):
        case.save(step)
    case = Case(root, KeepLatest(1))
    assert case.save(4, FailingDisk("remove_tree", times=1)) is None
    assert "Could not remove" in caplog.text
    assert case.events.steps("committed") == [4]
    assert [info.step for info in CheckpointStore(root).committed()] == [4]
    assert case.events.steps("purged") == [2, 3]


def test_weights_only_checkpoints_are_neither_counted_nor_purged(root: Path) -> None:
    case = Case(root, KeepLatest(1))
    case.save(1, kind=CheckpointKind.WEIGHTS_ONLY)
    case.save(2)
    case.save(3, kind=CheckpointKind.WEIGHTS_ONLY)
    assert case.names() == ["step-1", "step-2", "step-3"]
    case.save(4)
    assert case.names() == ["step-1", "step-3", "step-4"]


def test_a_save_is_over_when_retention_is(root: Path) -> None:
    """Else the next save, or a retry of this step, could begin while its thread still removes folders."""

    class Looking(Durable):
        """Records, in the middle of a removal, whether the save counts as settled."""

        def remove_tree(self, path: Path) -> None:
            case.in_flight.poll()
            settled.append(list(case.events.steps("committed")))
            super().remove_tree(path)

    settled: list[list[int]] = []
    case = Case(root, KeepLatest(1))
    case.save(1)
    case.begin(2, Looking())
    case.saver.complete()
    assert settled == [[1]]
    case.in_flight.poll()
    assert case.events.steps("committed") == [1, 2]


class Slow(SyncSaver):
    """Saves in three seconds while the caller waits."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(PEERS)
        self._clock = clock

    def save(self, state: State, target: SaveTarget) -> PendingSave:
        self._clock.seconds += 3
        return super().save(state, target)


def test_a_save_that_the_caller_waits_for_stalls_training_for_all_of_it(root: Path) -> None:
    case = Case(root)
    begin(case.in_flight, 1, CheckpointStore(root), partial(Slow(case.clock).save, {}))
    assert case.events.figures("staged") == {"stall_seconds": 3}
    case.clock.seconds += 10
    case.in_flight.poll()
    figures = case.events.figures("committed")
    assert (figures["seconds"], figures["stall_seconds"]) == (3, 3)
    assert (case.in_flight.last_durable, case.in_flight.last_seconds) == (1, 3)


def test_waiting_for_the_end_of_a_save_counts_as_blocked_time_too(root: Path) -> None:
    case = Case(root)
    case.begin(1)
    case.clock.seconds += 5
    wait = case.saver.durable.exception

    def waited(timeout: float | None = None) -> BaseException | None:
        if not case.saver.durable.done():
            case.clock.seconds += 4
            case.saver.complete()
        return wait(timeout)

    case.saver.durable.exception = waited  # type: ignore[method-assign]  # time passes while a thread waits
    case.in_flight.settle()
    figures = case.events.figures("committed")
    assert (figures["seconds"], figures["stall_seconds"]) == (9, 4)


def test_the_step_in_flight_is_known_until_it_is_settled(root: Path) -> None:
    case = Case(root)
    assert case.in_flight.step is None
    case.begin(7)
    assert (case.in_flight.step, case.in_flight.failed) == (7, False)
    case.saver.complete()
    assert case.in_flight.step == 7
    case.in_flight.settle()
    assert case.in_flight.step is None
    assert (case.in_flight.last_durable, case.in_flight.last_seconds) == (7, 0)


def test_a_failed_save_does_not_become_the_last_durable_one(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(root)
    case.save(1)
    case.save(2, FailingDisk("rename"))
    assert case.in_flight.last_durable == 1
    assert "the save of step 2 failed" in caplog.text
    assert "(failed save 1 of at most 3 in a row)" in caplog.text


def test_whatever_a_saver_fails_with_is_a_failed_save_of_that_step(root: Path) -> None:
    case = Case(root)
    case.begin(4)
    case.saver.durable.set_exception(ValueError("an odd state"))
    failure = case.in_flight.settle()
    assert failure is not None
    assert (failure.step, failure.cause) == (4, "ValueError: an odd state")
    assert case.events.figures("save_failed") == {"reason": "ValueError: an odd state", "in_a_row": 1}


def test_a_lost_folder_is_no_failed_save_but_the_end_of_the_run(root: Path) -> None:
    for end in (InFlightSave.settle, InFlightSave.outcome):
        case = Case(root)
        case.begin(1)
        case.saver.durable.set_exception(LeaseLost(str(root), "another job"))
        with pytest.raises(LeaseLost):
            end(case.in_flight)
        assert case.events.steps("save_failed") == []
        assert case.in_flight.step is None


def test_the_group_of_saves_is_in_doubt_if_and_only_if_a_save_did_not_end_in_time(root: Path) -> None:
    peers, events = Peers(timedelta(seconds=60)), Events()
    for saver, is_in_doubt in ((SyncSaver(peers), False), (HeldSaver(), True)):
        context = RunContext(Checkpoint(timeout_seconds=1), peers, Clock(), events.emit)
        in_flight = InFlightSave(Housekeeping(KeepAll(), events.emit), context)
        begin(in_flight, 1, CheckpointStore(root), partial(saver.save, {}))
        in_flight.settle()
        assert peers.is_group_in_doubt == is_in_doubt


def test_settling_waits_for_retention_too(root: Path) -> None:
    """Else the next save could begin while the thread of this one still removes folders."""
    case = Case(root, KeepLatest(1))
    case.save(1)
    case.save(2)
    waiting = threading.Event()

    class Late(Durable):
        """Begins to remove once a thread waits for the save."""

        def remove_tree(self, path: Path) -> None:
            assert waiting.wait(60)
            super().remove_tree(path)

    case.begin(3, Late())
    wait = case.saver.durable.exception

    def waited(timeout: float | None = None) -> BaseException | None:
        waiting.set()
        return wait(timeout)

    case.saver.durable.exception = waited  # type: ignore[method-assign]  # to see when a thread waits
    thread = threading.Thread(target=case.saver.complete)
    thread.start()
    case.in_flight.settle()
    reported = [(name, step) for name, step, _ in case.events.recorded if name in ("purged", "committed")]
    thread.join()
    assert reported[-2:] == [("purged", 2), ("committed", 3)]


class SecondRank(Peers):
    """The peers as the second rank sees them."""

    rank = 1  # type: ignore[assignment]  # for a property


def test_only_the_coordinator_cleans_the_folder_and_reports_a_save(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(root)
    for step in (1, 2):
        case.save(step)
    events, saver = Events(), HeldSaver()
    housekeeping = Housekeeping(KeepLatest(1), events.emit)
    peers = SecondRank(timedelta(seconds=60))
    in_flight = InFlightSave(housekeeping, RunContext(Checkpoint(), peers, Clock(), events.emit))
    store = CheckpointStore(root, free_bytes=lambda path: 0)
    caplog.clear()
    with caplog.at_level(logging.INFO, "torchtitan_lite"):
        begin(in_flight, 3, store, partial(saver.save, {}))
        saver.durable.set_result(None)
        in_flight.poll()
    assert in_flight.last_durable == 3
    assert [name for name, *_ in events.recorded] == ["save_started", "staged"]
    assert [record for record in caplog.records if record.name == "torchtitan_lite"] == []
    place = store.begin(4)
    begin(in_flight, 4, store, partial(saver.save, {}))
    saver.durable.set_exception(SaveFailed(4, "of the disk"))
    assert in_flight.settle() is not None
    assert case.names() == ["step-1", "step-2", place]


def test_only_the_coordinator_checks_for_room(root: Path) -> None:
    Case(root).save(1)
    full = CheckpointStore(root, free_bytes=lambda path: 0)
    for peers, is_refused in ((PEERS, True), (SecondRank(timedelta(seconds=60)), False)):
        targets: list[SaveTarget] = []
        saver = HeldSaver()
        save = saver.save

        def noted(
            state: State, target: SaveTarget, save: Any = save, targets: list[SaveTarget] = targets
        ) -> PendingSave:
            targets.append(target)
            pending: PendingSave = save(state, target)
            return pending

        saver.save = noted  # type: ignore[method-assign]  # to have the target
        in_flight = InFlightSave(Housekeeping(KeepAll(), ignore), RunContext(Checkpoint(), peers, Clock(), ignore))
        begin(in_flight, 2, full, partial(saver.save, {}))
        if is_refused:
            with pytest.raises(SaveFailed, match="room for"):
                targets[0].check()
        else:
            targets[0].check()


def test_a_weights_only_save_is_reported_as_one(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(root)
    with caplog.at_level(logging.INFO, "torchtitan_lite"):
        case.save(1)
        case.save(2, kind=CheckpointKind.WEIGHTS_ONLY)
    assert "Saved step 1: " in caplog.text
    assert "Saved step 2: " in caplog.text
    assert caplog.text.count(", weights only") == 1
    assert [figures["kind"] for name, _, figures in case.events.recorded if name == "save_started"] == [
        "full",
        "weights_only",
    ]


def test_a_save_needs_as_much_room_as_the_one_before_it_took(root: Path) -> None:
    case = Case(root)
    case.save(1)
    needed = CheckpointStore(root).get(1).nbytes
    for free, step in ((needed, 2), (needed - 1, 3)):
        store = CheckpointStore(root, free_bytes=lambda path, free=free: free)
        begin(case.in_flight, step, store, partial(case.saver.save, {"weight": torch.ones(3)}))
        case.saver.complete()
        failure = case.in_flight.settle()
        assert (failure is None) == (free == needed)
    assert case.names() == ["step-1", "step-2"]
