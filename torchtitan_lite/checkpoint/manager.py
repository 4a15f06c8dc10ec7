"""When to save, what, how, where, which to keep: asked in this order, answered elsewhere.

The manager composes a save policy, a saver, a store, a retention policy and the ranks' consensus;
it knows no file name, no clock and no mode. One save is in flight at most. A save that fails is
reported, counted and tried again at the next interval; `max_failed_saves` in a row end the run.
Every public method is **collective** unless it says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchtitan_lite.checkpoint.resume.ending import Ended, ended_run, export_of
from torchtitan_lite.checkpoint.resume.load_source import LoadSource, latest_step, new_run
from torchtitan_lite.checkpoint.resume.resume_report import ResumeReport
from torchtitan_lite.checkpoint.resume.run_load import RunLoad
from torchtitan_lite.checkpoint.saving.departure import Departure
from torchtitan_lite.checkpoint.saving.first_save import FirstSave
from torchtitan_lite.checkpoint.saving.in_flight import build_in_flight
from torchtitan_lite.checkpoint.saving.replicas import build_replicas
from torchtitan_lite.checkpoint.saving.run_saves import RunSaves
from torchtitan_lite.checkpoint.saving.save_plan import PlanCache
from torchtitan_lite.checkpoint.saving.savers import Saver, SyncSaver, build_saver
from torchtitan_lite.checkpoint.saving.writer import Origin
from torchtitan_lite.checkpoint.schedule.interval import (
    SavePolicy,
    Tick,
    build_save_policy,
    build_skips_when_busy,
    split,
)
from torchtitan_lite.checkpoint.schedule.preemption import PreemptionWatch
from torchtitan_lite.checkpoint.staging.guard import StagingGuard
from torchtitan_lite.checkpoint.state import arguments
from torchtitan_lite.checkpoint.state.run_state import RunState
from torchtitan_lite.checkpoint.state.stateful import Stateful
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.disk.forks import forget_in_children
from torchtitan_lite.distributed.consensus import Peers, StepConsensus, StepFlags
from torchtitan_lite.log import logger
from torchtitan_lite.store.housekeeping import OnEvent, build_housekeeping
from torchtitan_lite.store.retention import RetentionPolicy, build_retention
from torchtitan_lite.store.run_folders import RunFolders
from torchtitan_lite.store.store import CheckpointStore


class CheckpointManager:
    """Saves and loads a run: model, optimizers, LR schedulers, dataloader and any further `Stateful`s in `states`.

    Model, optimizers and schedulers are one object or a list; of the last two there may be none. Raises ConfigError
    for an argument that is something else.

    Nothing is touched by the constructor; `load`, `save` or `reset` open what is needed. Use it as a context
    manager, or call `close`.
    """

    def __init__(
        self,
        dataloader: Stateful | None,
        model_parts: nn.Module | Sequence[nn.Module],
        optimizers: Optimizer | Sequence[Optimizer] | None,
        lr_schedulers: LRScheduler | Sequence[LRScheduler] | None,
        states: Mapping[str, Stateful] | None,
        job_config: JobConfig,
        *,
        store: CheckpointStore | None = None,
        saver: Saver | None = None,
        save_policy: SavePolicy | None = None,
        retention: RetentionPolicy | None = None,
        consensus: StepConsensus | None = None,
        peers: Peers | None = None,
        preemption: PreemptionWatch | None = None,
        topology: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_event: OnEvent | None = None,
    ) -> None:
        arguments.check_arguments(dataloader, states, job_config)
        config = job_config.checkpoint
        timeout = timedelta(seconds=config.timeout_seconds)
        lineage = new_run()
        self._job_config = job_config
        self._config = config
        self._clock = clock
        self._on_event = on_event or _ignore
        self._peers = peers or Peers(timeout)
        self._run = RunState(dataloader, model_parts, optimizers, lr_schedulers, states)
        self._folders = RunFolders(job_config, lineage.run_id, store)
        self._store = self._folders.checkpoints
        plans = PlanCache(self._peers, build_replicas(self._run.model.parameter_names, self._run.small))
        self._saver = saver or build_saver(config, self._peers, plans)
        self._step_policy, self._clock_policy = split(save_policy or build_save_policy(config))
        self._skips_when_busy = build_skips_when_busy(config)
        self._consensus = consensus or StepConsensus(timeout)
        self._preemption = preemption or PreemptionWatch(config.preemption_signals, config.preemption_grace_seconds)
        self._first_save = FirstSave(self._store, config, self._peers)
        self._housekeeping = build_housekeeping(config, retention or build_retention(config), self._on_event)
        self._in_flight = build_in_flight(config, self._peers, self._housekeeping, clock, self._on_event)
        topology = topology or f"{self._peers.world_size} ranks"
        self._load = RunLoad(self._run, self._store, job_config, topology, self._peers, clock, self._on_event)
        self._saves = RunSaves(
            self._run,
            self._folders,
            self._in_flight,
            self._saver,
            SyncSaver(self._peers, plans),
            config,
            Origin(lineage, topology, job_config.to_dict(), config.tensor_digests),
            self._peers,
            clock,
            self._on_event,
        )
        self._departure = Departure(self._preemption, self._saves, self._in_flight, self._peers, self._on_event)
        self._guard = StagingGuard(self._run.optimizers, self.maybe_wait_for_staging)
        self._is_open = False
        self.loaded_step: int | None = None
        """Step that `load` went on from; None for a fresh start."""
        self.preempted_by = 0
        """The signal that the ranks agreed to leave for, after `save` saved or before training; 0 for none."""
        if config.enable_checkpoint:
            logger.info("Checkpointing active. Checkpoints will be loaded from and saved to %s", self._store.root)

    def open(self) -> None:
        """The folder is this job's, and signals are watched; the other methods see to it too. Raises `FolderInUse`."""
        if self._config.enable_checkpoint:
            self._open()

    def load(self, step: int = -1) -> bool:
        """Loads `step` itself, by default what the config says: `load_step`, the latest, or `initial_load_path`.

        A damaged checkpoint is passed over for the next older one. False means a fresh start: nothing was there,
        nothing was changed. Raises `CheckpointNotFound`, `CheckpointMismatch` and what a state refuses with, on every
        rank, before the model is touched, and `AllCheckpointsDamaged`. Sets `preempted_by` if a rank was asked to leave
        meanwhile: nothing is trained yet, so there is nothing to save.
        """
        if not self._config.enable_checkpoint:
            return False
        self._open()
        self._in_flight.settle()
        self._housekeeping.wait(self._config.timeout_seconds)
        source = self._load.load(step)
        if source is not None:
            self._continue_from(source)
        self._first_save.allow()
        self.preempted_by = self._departure.untrained(self.loaded_step or 0)
        return source is not None

    def dry_run(self) -> ResumeReport | None:
        """What `load` would do, and refuse; None for a fresh start. Nothing of the run is changed, nothing on disk."""
        if not self._config.enable_checkpoint:
            return None
        return self._load.report()

    def save(self, curr_step: int, force: bool = False) -> bool:
        """Call at the end of every step. Saves if a save is due, if `force` (the last step), or if the ranks leave.

        True if this step was saved or is being saved. A forced save and one before leaving are durable on return;
        they raise `SaveFailed` if a second try fails too.
        """
        if not self._config.enable_checkpoint:
            return False
        self._open()
        self._first_save.check()
        agreed = self._consensus.receive()
        self._take_note(agreed)
        self.preempted_by = 0 if force else agreed.signal
        saved = not self._config.load_only and self._save_if_due(curr_step, force, agreed)
        self._saves.prepare(curr_step, now=True)  # After the first step there is all that is to be saved.
        self._consensus.send(self._flags(curr_step))
        return saved

    def maybe_wait_for_staging(self) -> None:
        """Returns when the state may change: call right before the optimizer's step. Not collective."""
        self._in_flight.wait_for_staging()

    def reset(self) -> None:
        """Starts the clock of seconds intervals: call right before the loop."""
        if self._config.enable_checkpoint:
            self._open()
            self._first_save.check()
            self._saves.prepare(self.loaded_step or 0, now=False)
        self._saves.leave_out(self.loaded_step or 0)

    def latest_step(self) -> int:
        """The latest committed step, full or weights only, of what `load` would go on with; -1 if there is none."""
        if not self._config.enable_checkpoint:
            return -1
        self._open()
        self._in_flight.settle()
        return self._peers.on_coordinator(lambda: latest_step(self._store, self._config))

    def ended(self) -> Ended | None:
        """Return how the run ended if it is done, all that it was to leave being there. Nothing is opened or changed.

        None while there is something to train, to save or to export.
        """
        if not self._config.enable_checkpoint:
            return None
        return self._peers.on_coordinator(lambda: ended_run(self._store, self._folders.exports, self._job_config))

    def finish(self, step: int) -> None:
        """Make what a run that was loaded at `step`, its last one, has not left: the export. Durable on return.

        Raises `SaveFailed` if a second try fails too.
        """
        export = self._folders.exports
        if not self._config.enable_checkpoint or self._config.load_only or export is None:
            return
        self._open()
        self._first_save.check()
        self._in_flight.settle()
        run_id = self._saves.origin.lineage.run_id
        if self._peers.on_coordinator(lambda: export_of(step, run_id, export, self._job_config) is None):
            self._saves.export(step)

    def close(self) -> None:
        """Waits for the save in flight, reports how it ended, and ends threads and processes. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        with ExitStack() as in_reverse:
            in_reverse.callback(self._folders.release)
            in_reverse.callback(self._preemption.close)
            in_reverse.callback(self._housekeeping.close, self._config.timeout_seconds)
            in_reverse.callback(self._saver.close, self._config.timeout_seconds)
            in_reverse.callback(self._guard.close)
            in_reverse.callback(self._in_flight.settle)
            in_reverse.callback(self._consensus.drain)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as closing:
            if error is None:
                raise
            logger.warning("While leaving after an error, the checkpoint manager could not close: %s", closing)

    def _open(self) -> None:
        if self._is_open:
            return
        arguments.refuse_dry_run(self._config)
        self._is_open = True
        forget_in_children(self._forget)
        try:
            self._preemption.start()
            self._guard.start()
            self._run.optimizer.refuse_where_parts_differ(self._peers)
            if not self._config.load_only:
                self._peers.on_coordinator(self._folders.take)
                self._peers.together(self._saver.start)
        except BaseException:
            self.close()
            raise

    def _forget(self) -> None:
        """Nothing is open, in a child that was just forked: closing it there touches nothing of the parent's."""
        self._is_open = False

    def _continue_from(self, source: LoadSource) -> None:
        self._saves.continue_from(source.lineage)
        self._in_flight.forget_lineage()
        self.loaded_step = source.continues_at
        if not source.initial and not source.has_nan:
            self._housekeeping.note_good(source.step)

    def _take_note(self, agreed: StepFlags) -> None:
        if agreed.signal:
            self._preemption.leave()  # What is in flight is waited for, and looked at, before leaving.
        elif agreed.save_failed:
            self._in_flight.settle()
        else:
            self._in_flight.poll()

    def _save_if_due(self, step: int, force: bool, agreed: StepFlags) -> bool:
        if self.preempted_by:
            return self._departure.after(step, self.preempted_by)
        due = self._step_policy.due(Tick(step, self._clock()), self._saves.last) or agreed.save_due
        if force:
            self._in_flight.outcome()  # However it ended: this save is tried.
            self._saves.last_of_all(step)
        elif due and self._skips_when_busy and (busy_with := self._busy_with(agreed)) >= 0:
            due = self._saves.skip(step, busy_with)
        elif due:
            self._in_flight.settle()
            logger.info("Saving step %d", step)
            self._saves.begin(step)
            self._in_flight.poll()
        return force or due

    def _busy_with(self, agreed: StepFlags) -> int:
        """Return the step that a rank is still writing, -1 if none is: as it is now, not as it was a step ago."""
        if agreed.step_in_flight < 0:
            return -1
        return self._peers.max_over_ranks(agreed.step_in_flight if self._in_flight.is_writing else -1)[0]

    def _flags(self, step: int) -> StepFlags:
        return StepFlags(
            save_due=self._clock_policy.due(Tick(step, self._clock()), self._saves.last),
            save_failed=self._in_flight.failed,
            step_in_flight=-1 if self._in_flight.step is None else self._in_flight.step,
            signal=self._preemption.received,
        )


def _ignore(event: str, step: int, /, **figures: Any) -> None:
    """The default `on_event`."""
