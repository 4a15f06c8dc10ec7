"""When to save, what, how, where, which to keep: asked in this order, answered elsewhere.

The manager composes a save policy, a saver, a store, a retention policy and the ranks' consensus;
it knows no file name, no clock and no mode. One save is in flight at most. A save that fails is
reported, counted and tried again at the next interval; `max_failed_saves` in a row end the run.
Every public method is **collective** unless it says otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchtitan_lite import faults
from torchtitan_lite.checkpoint import arguments
from torchtitan_lite.checkpoint.ending import Ended, ended_run, export_of
from torchtitan_lite.checkpoint.export import DTYPES, weights_only
from torchtitan_lite.checkpoint.fallback import Candidates
from torchtitan_lite.checkpoint.first_save import FirstSave
from torchtitan_lite.checkpoint.forks import forget_in_children
from torchtitan_lite.checkpoint.in_flight import InFlight
from torchtitan_lite.checkpoint.interval import SavePolicy, Tick, build_save_policy, build_skips_when_busy, split
from torchtitan_lite.checkpoint.leaving import Leaving, how_to_leave
from torchtitan_lite.checkpoint.load_source import LoadSource, new_run, newest_step
from torchtitan_lite.checkpoint.preemption import PreemptionWatch
from torchtitan_lite.checkpoint.replicas import build_replicas
from torchtitan_lite.checkpoint.restore import RNG, Restore
from torchtitan_lite.checkpoint.resume_report import ResumeReport
from torchtitan_lite.checkpoint.rng import RngState
from torchtitan_lite.checkpoint.save_plan import PlanCache
from torchtitan_lite.checkpoint.savers import RefusingSaver, Saver, State, SyncSaver, build_saver
from torchtitan_lite.checkpoint.staging_guard import StagingGuard
from torchtitan_lite.checkpoint.stateful import LRSchedulerWrapper, ModelWrapper, OptimizerWrapper, Stateful
from torchtitan_lite.checkpoint.upkeep import OnEvent, build_upkeep
from torchtitan_lite.checkpoint.writer import Origin
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.distributed.consensus import Facts, Peers, StepConsensus
from torchtitan_lite.errors import ConfigError, SaveFailed
from torchtitan_lite.log import logger
from torchtitan_lite.store.lease import Lease
from torchtitan_lite.store.manifest import CheckpointKind
from torchtitan_lite.store.retention import RetentionPolicy, build_retention
from torchtitan_lite.store.store import CheckpointStore
from torchtitan_lite.store.unusable import usable


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
        dump_folder = Path(job_config.job.dump_folder)
        self._job_config = job_config
        self._config = config
        self._model = ModelWrapper(arguments.model_parts(model_parts))
        states = states or {}
        modules = {name: state for name, state in states.items() if isinstance(state, nn.Module)}
        own_optimizers = arguments.optimizers(optimizers)
        self._optimizer = OptimizerWrapper(self._model.parts, own_optimizers, modules)
        self._small_states = _small_states(dataloader, arguments.lr_schedulers(lr_schedulers), states)
        self._store = store or CheckpointStore(dump_folder / config.folder)
        self._export_store = CheckpointStore(dump_folder / config.export_folder) if config.export_folder else None
        self._peers = peers or Peers(timeout)
        plans = PlanCache(self._peers, build_replicas(self._model.parameter_names, self._small_states))
        self._saver = saver or build_saver(config, self._peers, plans)
        self._sync_saver = SyncSaver(self._peers, plans)
        self._step_policy, self._clock_policy = split(save_policy or build_save_policy(config))
        self._skips_when_busy = build_skips_when_busy(config)
        self._consensus = consensus or StepConsensus(timeout)
        self._preemption = preemption or PreemptionWatch(config.preemption_signals, config.preemption_grace_seconds)
        self._clock = clock
        self._on_event = on_event or _nobody_listens
        self._lineage = new_run()
        self._first_save = FirstSave(self._store, config, self._peers)
        self._leases = {
            each.root: Lease(
                each.root,
                run_id=self._lineage.run_id,
                timeout_seconds=config.lease_timeout_seconds,
                make_room=functools.partial(_recover, each),
            )
            for each in (self._store, self._export_store)
            if each is not None
        }
        self._upkeep = build_upkeep(config, retention or build_retention(config), self._on_event)
        self._in_flight = InFlight(
            self._peers,
            self._upkeep,
            timeout_seconds=config.timeout_seconds,
            max_failed_saves=config.max_failed_saves,
            clock=clock,
            on_event=self._on_event,
            exit_seconds=min(config.preemption_grace_seconds, config.timeout_seconds),
        )
        self._guard = StagingGuard(own_optimizers, self.maybe_wait_for_staging)
        self._topology = topology or f"{self._peers.world_size} ranks"
        self._last_save = Tick(0, clock())
        self._is_open = False
        self._is_prepared = False
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
        """Loads `step` itself, by default what the config says: `load_step`, the newest, or `initial_load_path`.

        A damaged checkpoint is passed over for the next older one. False means a fresh start: nothing was there,
        nothing was changed. Raises `CheckpointNotFound`, `CheckpointMismatch` and what a state refuses with, on every
        rank, before the model is touched, and `AllCheckpointsDamaged`. Sets `preempted_by` if a rank was asked to leave
        meanwhile: nothing is trained yet, so there is nothing to save.
        """
        if not self._config.enable_checkpoint:
            return False
        self._open()
        self._in_flight.settle()
        self._upkeep.wait(self._config.timeout_seconds)
        wanted = step if step != -1 else self._config.load_step
        candidates = Candidates(self._store, wanted, self._config, self._peers, self._on_event, is_exact=step != -1)
        source = candidates.take(lambda source: self._load(wanted, source))
        if source is None:
            self._tell_what_is_passed_over(wanted)
            logger.info("No checkpoint in %s: a fresh start.", self._store.root)
        else:
            self._go_on_from(source)
        self._first_save.allow()
        self._leave_untrained()
        return source is not None

    def dry_run(self) -> ResumeReport | None:
        """What `load` would do, and refuse; None for a fresh start. Nothing of the run is changed, nothing on disk."""
        if not self._config.enable_checkpoint:
            return None
        source = Candidates(self._store, self._config.load_step, self._config, self._peers, self._on_event).first()
        return None if source is None else self._restore(source).report()

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
        self._prepare_saver(now=True)  # After the first step there is all that is to be saved.
        self._consensus.send(self._facts(curr_step))
        return saved

    def maybe_wait_for_staging(self) -> None:
        """Returns when the state may change: call right before the optimizer's step. Not collective."""
        self._in_flight.wait_for_staging()

    def reset(self) -> None:
        """Starts the clock of seconds intervals: call right before the loop."""
        if self._config.enable_checkpoint:
            self._open()
            self._first_save.check()
            self._prepare_saver(now=False)
        self._last_save = Tick(self.loaded_step or 0, self._clock())

    def newest_step(self) -> int:
        """The newest committed step, full or weights only, of what `load` would go on with; -1 if there is none."""
        if not self._config.enable_checkpoint:
            return -1
        self._open()
        self._in_flight.settle()
        return self._peers.decide(lambda: newest_step(self._store, self._config))

    def ended(self) -> Ended | None:
        """Return how the run ended if it is done, all that it was to leave being there. Nothing is opened or changed.

        None while there is something to train, to save or to export.
        """
        if not self._config.enable_checkpoint:
            return None
        return self._peers.decide(lambda: ended_run(self._store, self._export_store, self._job_config))

    def finish(self, step: int) -> None:
        """Make what a run that was loaded at `step`, its last one, has not left: the export. Durable on return.

        Raises `SaveFailed` if a second try fails too.
        """
        export = self._export_store
        if not self._config.enable_checkpoint or self._config.load_only or export is None:
            return
        self._open()
        self._first_save.check()
        self._in_flight.settle()
        run_id = self._lineage.run_id
        if self._peers.decide(lambda: export_of(step, run_id, export, self._job_config) is None):
            self._export(step)

    def close(self) -> None:
        """Waits for the save in flight, reports how it ended, and ends threads and processes. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        with ExitStack() as in_reverse:
            for lease in self._leases.values():
                in_reverse.callback(lease.release)
            in_reverse.callback(self._preemption.close)
            in_reverse.callback(self._upkeep.close, self._config.timeout_seconds)
            in_reverse.callback(self._saver.close, self._config.timeout_seconds)
            in_reverse.callback(self._guard.close)
            in_reverse.callback(self._in_flight.settle)
            in_reverse.callback(self._consensus.drain)

    def forget(self) -> None:
        """Nothing is open, in a child that was just forked: closing it there touches nothing of the parent's."""
        self._is_open = False

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
        forget_in_children(self)
        try:
            self._preemption.start()
            self._guard.start()
            self._optimizer.refuse_where_parts_differ(self._peers)
            if not self._config.load_only:
                self._peers.decide(self._recover)
                self._saver.start()
        except BaseException:
            self.close()
            raise

    def _refuse_one_folder_for_both(self) -> None:
        if self._export_store is not None and self._export_store.is_in_the_same_place_as(self._store):
            raise ConfigError(
                f"checkpoint.export_folder: {self._export_store.root} is the folder of checkpoints too, where the "
                "export would take the place of the last full one. Name another folder."
            )

    def _recover(self) -> None:
        self._refuse_one_folder_for_both()
        faults.point("lease")
        for root, lease in self._leases.items():
            with usable(root):
                lease.take()
        faults.point("recover")
        for store in filter(None, (self._store, self._export_store)):
            with usable(store.root):
                _recover(store)

    def _go_on_from(self, source: LoadSource) -> None:
        self._lineage = source.lineage
        self._in_flight.forget_lineage()
        self.loaded_step = source.goes_on_at
        if not source.initial and not source.has_nan:
            self._upkeep.note_good(source.step)

    def _leave_untrained(self) -> None:
        self.preempted_by = max(self._peers.gather(self._preemption.received))
        if self.preempted_by:
            self._preemption.leave()
            step = self.loaded_step or 0
            logger.info("Trained nothing after step %d; leaving for %s.", step, signal.Signals(self.preempted_by).name)
            self._on_event("preempted", step, signal=self.preempted_by, given_up_steps=0)

    def _load(self, wanted: int, source: LoadSource) -> None:
        self._tell_what_was_chosen(wanted, source)
        began = self._clock()
        logger.info("Loading the checkpoint at step %d.", source.step)
        self._on_event("load_started", source.step, path=str(source.path))
        faults.set_step(source.step)
        faults.point("load")
        gc.collect()
        self._restore(source).run()
        gc.collect()
        seconds = self._clock() - began
        logger.info("Finished loading the checkpoint in %.2f seconds.", seconds)
        self._on_event("loaded", source.step, path=str(source.path), seconds=seconds, bytes=source.nbytes)

    def _tell_what_was_chosen(self, wanted: int, source: LoadSource) -> None:
        self._tell_what_is_passed_over(wanted)
        if source.initial:
            logger.info("Beginning from %s.", source.path)
        elif wanted not in (-1, source.step):
            logger.info("Step %d was gone back to already; going on from step %d of that branch.", wanted, source.step)
        if source.lineage.counts_again:
            logger.info("Steps are counted from the start again; the first save sets the old run's aside.")

    def _tell_what_is_passed_over(self, wanted: int) -> None:
        for path in self._store.unmanaged() if self._peers.is_coordinator and wanted == -1 else []:
            logger.warning("%s has no manifest and is passed over; to load it, ask for its step or path.", path)

    def _restore(self, source: LoadSource) -> Restore:
        return Restore(
            source,
            self._job_config,
            self._peers,
            model=self._model,
            optimizer=self._optimizer,
            small_states=self._small_states,
            topology=self._topology,
        )

    def _take_note(self, agreed: Facts) -> None:
        if agreed.signal:
            self._preemption.leave()  # What is in flight is waited for, and looked at, before leaving.
        elif agreed.save_failed:
            self._in_flight.settle()
        else:
            self._in_flight.poll()

    def _save_if_due(self, step: int, force: bool, agreed: Facts) -> bool:
        if self.preempted_by:
            return self._leave(step)
        due = self._step_policy.due(Tick(step, self._clock()), self._last_save) or agreed.save_due
        if force:
            self._in_flight.outcome()  # However it ended: this save is tried.
            self._save_last(step)
        elif due and agreed.step_in_flight >= 0 and self._skips_when_busy:
            due = self._skip(step, agreed.step_in_flight)
        elif due:
            self._in_flight.settle()
            self._begin(step, self._full_state, CheckpointKind.FULL, self._store, self._saver)
            self._in_flight.poll()
        return force or due

    def _skip(self, step: int, in_flight: int) -> bool:
        """The save of `step` is not made: the one before it was still being written a step ago."""
        logger.warning("step %d is not saved: the save of step %d is still being written.", step, in_flight)
        self._on_event("save_skipped", step, in_flight=in_flight)
        self._last_save = Tick(step, self._clock())
        return False

    def _leave(self, step: int) -> bool:
        """Something is durable on return: `step` (True), or what was in flight, if time is too short for more."""
        awaited = self._in_flight.step
        self._in_flight.outcome()  # However it ended: the ranks leave.
        if self._how_to_leave(step, awaited) is Leaving.AFTER_A_SAVE:
            self._save_and_wait(step, self._full_state, CheckpointKind.FULL, self._store)
        saved = self._peers.decide(lambda: self._in_flight.last_durable)
        assert saved is not None, "each way to leave has a durable save"
        if saved != step:
            logger.warning("The grace period is too short to save step %d too; a rerun trains it again.", step)
        logger.info("Saved step %d; leaving for %s.", saved, signal.Signals(self.preempted_by).name)
        self._on_event("preempted", saved, signal=self.preempted_by, given_up_steps=step - saved)
        return saved == step

    def _how_to_leave(self, step: int, awaited: int | None) -> Leaving:
        left = min(self._peers.gather(self._preemption.seconds_left()))  # The signal may have come to one rank alone.
        done = self._in_flight
        return self._peers.decide(
            lambda: how_to_leave(
                step, durable=done.last_durable, awaited=awaited, seconds_left=left, save_seconds=done.last_seconds
            )
        )

    def _save_last(self, step: int) -> None:
        if self._config.create_seed_checkpoint:
            seed = CheckpointKind.FULL
            self._save_and_wait(step, lambda: {"model": self._model.state_dict()}, seed, self._store)
            logger.info("Created seed checkpoint")
            return
        if not self._config.model_weights_only or self._export_store is not None:
            logger.info("Saving a full checkpoint at last step, step %d.", step)
            self._save_and_wait(step, self._full_state, CheckpointKind.FULL, self._store)
        if self._config.model_weights_only or self._export_store is not None:
            self._export(step)

    def _export(self, step: int) -> None:
        if self._export_store is None and self._peers.decide(lambda: self._is_saved_in_full(step)):
            logger.warning(
                "Step %d is saved in full, and stays so: its weights alone would take its place. "
                "Set --checkpoint.export_folder to have both.",
                step,
            )
            return
        dtype = DTYPES[self._config.export_dtype]
        logger.info("Saving a model weights only checkpoint in %s at last step, step %d.", dtype, step)
        store = self._export_store or self._store
        self._save_and_wait(
            step, lambda: weights_only(self._model.state_dict(), dtype), CheckpointKind.WEIGHTS_ONLY, store
        )

    def _is_saved_in_full(self, step: int) -> bool:
        return any(info.step == step and info.kind is CheckpointKind.FULL for info in self._store.committed())

    def _save_and_wait(
        self, step: int, make_state: Callable[[], State], kind: CheckpointKind, store: CheckpointStore
    ) -> None:
        """A save that must not fail: it is tried twice, and durable on return. Nothing may be in flight."""
        failure: SaveFailed | None = None
        for _ in range(2):
            self._begin(step, make_state, kind, store, self._sync_saver)
            failure = self._in_flight.outcome()
            if failure is None:
                return
        assert failure is not None
        raise failure

    def _prepare_saver(self, *, now: bool) -> None:
        """The saver is ready for a first save, off its path: `now`, or as soon as the optimizers have state.

        Asking an optimizer for state before its first step would make it.
        """
        if self._is_prepared or self._config.load_only:
            return
        if now or self._peers.highest(not self._optimizer.has_state()) == (0,):
            self._is_prepared = True
            self._saver.prepare(lambda: self._together(self.loaded_step or 0, self._full_state))

    def _begin(
        self, step: int, make_state: Callable[[], State], kind: CheckpointKind, store: CheckpointStore, saver: Saver
    ) -> None:
        fence = self._leases[store.root].check
        state: State = {}
        try:
            state = self._together(step, make_state)
        except SaveFailed as error:
            saver = RefusingSaver(error)
        self._in_flight.begin(step, state, kind, store, saver, self._origin(), fence)
        self._last_save = Tick(step, self._clock())

    def _origin(self) -> Origin:
        last = self._in_flight.last_durable
        lineage = self._lineage if last is None else dataclasses.replace(self._lineage, parent_step=last)
        return Origin(lineage, self._topology, self._job_config.to_dict(), self._config.tensor_digests)

    def _facts(self, step: int) -> Facts:
        return Facts(
            save_due=self._clock_policy.due(Tick(step, self._clock()), self._last_save),
            save_failed=self._in_flight.failed,
            step_in_flight=-1 if self._in_flight.step is None else self._in_flight.step,
            signal=self._preemption.received,
        )

    def _together(self, step: int, make_state: Callable[[], State]) -> State:
        """What `make_state` returns; one that a rank cannot give is a failed save, or wrong usage, on every rank."""
        state: State = {}
        error: Exception | None = None
        try:
            state = make_state()
        except ConfigError as raised:
            error = raised
        except Exception as raised:
            error = SaveFailed(step, f"rank {self._peers.rank}: {type(raised).__name__}: {raised}")
            error.__cause__ = raised
        self._peers.raise_together(error)
        return state

    def _full_state(self) -> State:
        small = {name: state.state_dict() for name, state in self._small_states.items()}
        # A key of its own for each rank: the generators are the one thing that ranks do not share.
        rng = {f"rank{self._peers.rank}": RngState().state_dict()}
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict(), **small, RNG: rng}


def _small_states(
    dataloader: Stateful | None, lr_schedulers: Sequence[LRScheduler], states: Mapping[str, Stateful]
) -> dict[str, Stateful]:
    taken = sorted({"model", "optimizer", "lr_scheduler", "dataloader", RNG} & states.keys())
    if taken:
        raise ConfigError(f"states: the name {taken[0]!r} is the manager's own. Give your state another name.")
    small: dict[str, Stateful] = {}
    if dataloader is not None:
        small["dataloader"] = dataloader
    if lr_schedulers:
        small["lr_scheduler"] = LRSchedulerWrapper(lr_schedulers)
    return small | dict(states)


def _recover(store: CheckpointStore) -> bool:
    """Leave nothing of a cut save in the folder, which is this job's. Return whether there was anything."""
    recovered = store.recover()
    for path in recovered:
        logger.info("Recovered from an earlier end in the middle of a save: %s", path)
    return bool(recovered)


def _nobody_listens(event: str, step: int, /, **figures: Any) -> None:
    """The default `on_event`."""
