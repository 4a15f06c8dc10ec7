"""The order in which a run is loaded, saved and left; each question is answered in a room of its own.

The manager calls a save policy, a saver, a store, a retention policy and the ranks' consensus; it knows no file
name, no clock and no mode. At most one save is in flight. A failed save is logged, counted and tried again at the next
interval; `max_failed_saves` in a row end the run. Its constructor is the list of its parts, each of which answers one
question, and of what ties them together; `Seams` are those that a caller may hand in.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakMethod, ref

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchtitan_lite.checkpoint.companions import build_companions
from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.open_managers import OneOpener, refuse_misfits
from torchtitan_lite.checkpoint.planning.plan_cache import PlanCache
from torchtitan_lite.checkpoint.planning.rank_comparison import RankComparison
from torchtitan_lite.checkpoint.planning.replicated import Replicated
from torchtitan_lite.checkpoint.reading.source import LoadSource
from torchtitan_lite.checkpoint.resume.ending import Ended
from torchtitan_lite.checkpoint.resume.initial_import import ImportWeights, InitialImport
from torchtitan_lite.checkpoint.resume.load_guard import FirstSave
from torchtitan_lite.checkpoint.resume.load_source import latest_step, new_run
from torchtitan_lite.checkpoint.resume.resume_report import ResumeReport
from torchtitan_lite.checkpoint.resume.roll_back import Limit, RollBack
from torchtitan_lite.checkpoint.resume.run_load import RunLoad
from torchtitan_lite.checkpoint.resume.wrong_folder import refuse_wrong_folders
from torchtitan_lite.checkpoint.run_end import LastFormat, RunEnd, build_last_save
from torchtitan_lite.checkpoint.run_folders import RunFolders
from torchtitan_lite.checkpoint.saving.auto_interval import build_auto_intervals
from torchtitan_lite.checkpoint.saving.companion import heard_by, protected_by, sources_of
from torchtitan_lite.checkpoint.saving.decider import Departure, SaveDecider
from torchtitan_lite.checkpoint.saving.in_flight import InFlightSave
from torchtitan_lite.checkpoint.saving.maker import SaveMaker
from torchtitan_lite.checkpoint.saving.savers import SyncSaver, build_saver
from torchtitan_lite.checkpoint.saving.target import Origin, build_origin
from torchtitan_lite.checkpoint.schedule.interval import SavePolicy, build_save_policy
from torchtitan_lite.checkpoint.schedule.optimum import Past
from torchtitan_lite.checkpoint.schedule.preemption import PreemptionWatch
from torchtitan_lite.checkpoint.seams import Seams
from torchtitan_lite.checkpoint.state import arguments
from torchtitan_lite.checkpoint.state.optimizer_state import StateOwner
from torchtitan_lite.checkpoint.state.run_state import RunState
from torchtitan_lite.checkpoint.state.stateful import Stateful
from torchtitan_lite.checkpoint.state.step_hooks import StepHooks
from torchtitan_lite.checkpoint.state.train_state import Metrics, check_metrics
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.config.own_loop import loop_config, refuse_replaced
from torchtitan_lite.disk.forks import forget_in_children
from torchtitan_lite.distributed.groups import naming_missing_ranks
from torchtitan_lite.distributed.host_mismatch import clock_around
from torchtitan_lite.distributed.lost_peer import as_peer_lost
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.distributed.step_consensus import StepConsensus
from torchtitan_lite.distributed.tried_torch import report_later_torch
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.events import EventListener, emit_to
from torchtitan_lite.log import logger
from torchtitan_lite.store.housekeeping import build_housekeeping
from torchtitan_lite.store.retention import RetentionPolicy, build_retention
from torchtitan_lite.store.rollbacks import Rollback, batches_to_skip

_SECONDS_TO_LEAVE = 5.0
"""Of the grace period, for what comes after the companions."""


class CheckpointManager:
    """Save and load a run: model, optimizers, LR schedulers, dataloader and any further `Stateful`s, or plain dicts, in
    `states`.

    Model, optimizers and schedulers are one object or a list; of the last two there may be none. Raises ConfigError
    for an argument that is something else. `for_loop` makes one from keywords; this is torchtitan's constructor.

    The constructor touches nothing; `load`, `save` or `reset` open what is needed, as `open` does, and raise what it
    raises. Use the manager in a `with` statement, or call `close`. A second manager of this process that opens the same
    folder closes this one, whose next call but `load` and `close` raises ConfigError.

    Every method is **collective** unless it says otherwise: all ranks call it, at the same point of the loop and with
    the same arguments, in the main thread. An error of one rank is raised on all of them, unless it says otherwise.
    With `enable_checkpoint=False` every method returns at once, as if there were nothing to load and to save.
    """

    def __init__(
        self,
        dataloader: Stateful | None,
        model_parts: nn.Module | Sequence[nn.Module],
        optimizers: Optimizer | Sequence[Optimizer] | None,
        lr_schedulers: LRScheduler | Sequence[LRScheduler] | None,
        states: Mapping[str, Stateful | dict[Any, Any]] | None,
        job_config: JobConfig,
        *,
        seams: Seams | None = None,
        topology: str | None = None,
        hugging_face: LastFormat | None = None,
        import_weights: ImportWeights | None = None,
        ranks_may_differ: bool = False,
        state_owner: StateOwner | None = None,
    ) -> None:
        seams = seams or Seams()
        arguments.check_arguments(dataloader, states, job_config)
        arguments.check_policies(seams.save_policy, seams.retention, state_owner)
        self._job_config, self._config = job_config, job_config.checkpoint
        config, lineage, timeout = self._config, new_run(), timedelta(seconds=self._config.timeout_seconds)
        self._peers = peers = seams.peers or Peers(timeout)
        consensus = seams.consensus or StepConsensus(timeout)
        self._own_groups = [each for each in (peers, consensus) if each not in (seams.peers, seams.consensus)]
        objects, topology = (dataloader, model_parts, optimizers), topology or f"{peers.world_size} ranks"
        self._run = run = RunState(*objects, lr_schedulers, states, config.save_trained_only, state_owner)
        self._folders = folders = RunFolders(job_config, lineage.run_id, seams.store)
        self._store = folders.checkpoints

        watches = "ranks" in config.digest_tensors
        self._comparison = RankComparison(peers, may_differ=ranks_may_differ, watches=watches)
        replicated = Replicated(run.model.parameter_names, run.small)
        of_ranks = run.states_of_ranks
        plans = PlanCache(peers, replicated, self._comparison, states_of_ranks=of_ranks, state_owner=state_owner)

        context = RunContext(config, peers, seams.clock or time.monotonic, emit_to(seams.on_event))
        rules = seams.retention or build_retention(config)
        self._companions = build_companions(folders, None if rules is seams.retention else rules, plans, context)
        context = dataclasses.replace(context, emit=heard_by(self._companions, context.emit))

        self._build_saves(seams, consensus, plans, rules, build_origin(job_config, lineage, topology), context)
        self._build_loads(topology, import_weights, context)
        last_save = build_last_save(hugging_face, job_config, run, folders, context)
        self._end = RunEnd(job_config, folders, self._maker, last_save, peers)

        before = (lambda _: self.maybe_wait_for_staging(), run.before_step)
        self._hooks = StepHooks(run.optimizers, before, [run.gradients.after_step])
        self._opener = OneOpener(folders, self._preemption, ref(self._in_flight), WeakMethod(self.close))
        self._is_open = self._has_started_saver = False
        self._rollbacks: Sequence[Rollback] = ()
        forget_in_children(self._forget)
        self.loaded_step: int | None = None
        """The step that `load` resumed from; None for a fresh start."""
        self.preempted_by = 0
        """The signal that the ranks agreed to leave for, after `save` saved or before training; 0 for none."""
        if config.enable_checkpoint:
            logger.info("Checkpointing active. Checkpoints will be loaded from and saved to %s", self._store.address)
        report_later_torch(peers.rank)

    def _build_saves(
        self,
        seams: Seams,
        consensus: StepConsensus,
        plans: PlanCache,
        rules: RetentionPolicy,
        origin: Origin,
        context: RunContext,
    ) -> None:
        """Make what saves: how a state becomes a checkpoint, who waits for it, and when one is due."""
        config, peers = context.config, context.peers
        self._saver = seams.saver or build_saver(config, peers, plans, self._companions)
        protected = partial(protected_by, self._companions)
        self._housekeeping = build_housekeeping(config, rules, context.emit, protected)
        self._in_flight = InFlightSave(self._housekeeping, context)
        savers = self._saver, SyncSaver(peers, plans)
        self._maker = SaveMaker(self._run, self._folders, self._in_flight, savers, origin, context, self._companions)

        self._preemption = seams.preemption or PreemptionWatch(
            config.preemption_signals, config.preemption_grace_seconds
        )
        self._departure = Departure(self._preemption, self._maker, self._in_flight, context)
        policy = build_save_policy(config, seams.save_policy)
        auto = build_auto_intervals(self._in_flight, seams.past or Past, context)
        self._decider = SaveDecider(policy, self._maker, self._in_flight, self._departure, consensus, auto, context)

    def _build_loads(self, topology: str, import_weights: ImportWeights | None, context: RunContext) -> None:
        """Make what loads: at a start, after an import, and back from where a run diverged."""
        sources = sources_of(self._companions)
        self._initial_import = InitialImport(self._store, import_weights, context, sources.has_checkpoint)
        self._load = RunLoad(self._run, self._folders, self._job_config, topology, sources, context)
        self._roll_back = RollBack(self._folders, self._load, self._run, context)
        self._first_save = FirstSave(self._store, self._config, self._peers)

    @classmethod
    def for_loop(
        cls,
        *,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        lr_scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        dataloader: Stateful | None = None,
        states: Mapping[str, Stateful | dict[Any, Any]] | None = None,
        folder: str | os.PathLike[str] = "outputs/checkpoint",
        hugging_face: LastFormat | None = None,
        ranks_may_differ: bool = False,
        state_owner: StateOwner | None = None,
        save_policy: SavePolicy | None = None,
        retention: RetentionPolicy | None = None,
        past: Callable[[], Past] | None = None,
        on_event: EventListener | None = None,
        **checkpoint: Any,
    ) -> CheckpointManager:
        """Return the manager of a training loop of your own; `checkpoint` takes any key of `[checkpoint]`.

        Checkpoints are enabled unless `enable_checkpoint=False` is given. `folder` holds the `step-N` folders.
        `last_save_in_hf` needs `hugging_face`, which says where each tensor is in Hugging Face's files. With
        `ranks_may_differ` the lowest rank's parameters and optimizer states are saved where ranks hold different ones
        under one name, for all ranks to load, in place of `RanksDiffer`. An optimizer state that only some of the ranks
        with its parameter have comes back to the same ranks, or on one rank all of it; `state_owner`, from a
        parameter's name and a number of ranks to the one rank with its state, or None, allows any other number.

        `save_policy` decides when to save, in place of keys about intervals. If it `needs_consensus`, the yes of any
        rank counts, for all one step later; if not, each rank saves by its own answer. `retention` decides which
        checkpoints stay, in place of the `keep_` keys, on rank 0 only. `past` returns what is known of earlier starts,
        for `interval_type="auto"`, on rank 0. Raises ConfigError for a policy next to keys that it replaces, for an
        unknown key, a wrong value or a wrong object. Any rank.
        """
        refuse_replaced(checkpoint, save_policy=save_policy is not None, retention=retention is not None)
        config = loop_config(folder, checkpoint)
        objects = dataloader, model, optimizer, lr_scheduler, states
        return cls(
            *objects,
            config,
            hugging_face=hugging_face,
            ranks_may_differ=ranks_may_differ,
            state_owner=state_owner,
            seams=Seams(save_policy=save_policy, retention=retention, past=past, on_event=on_event),
        )

    def open(self) -> None:
        """Take the folder for this job and watch signals, unless that is done. The other methods do so, too.

        Raises `FolderInUse` if another job has the folder (after waiting `lease_timeout_seconds` for one on another
        host that may have died), `FolderNotShared` if a rank sees another folder, `HostsDiffer` if versions, keys or
        clocks of ranks do not fit together, `FolderUnusable`, and ConfigError for `dry_run`, for a folder that is a
        checkpoint, or has only those of another tool, and for an optimizer that does not fit the model; the manager is
        closed then.
        """
        self._opened()

    def load(self, step: int = -1) -> bool:
        """Load `step`, by default what the config says: `load_step`, the latest, or `initial_load_path`.

        Wait for the save in flight, if there is one. Skip a damaged checkpoint for the next older one. Return False for
        a fresh start, which changes nothing. Raises `CheckpointNotFound`, `CheckpointMismatch` and what a state refuses
        with, before the model is touched, `CheckpointUnreadable`, `AllCheckpointsDamaged`, and `SaveFailed` of one in
        flight. Sets `loaded_step`, and `preempted_by` if a rank received a signal.
        """
        step = arguments.checked_step("load", step, -1)
        if not self._opened(again=True, step=step):
            return False
        self._settle()
        if step == -1:
            self._initial_import.run()
        with ExitStack() as unless_loaded:
            unless_loaded.callback(self._load.sources.close)
            source = self._load.load(step)
            if source is not None and not self._config.load_only:
                source = self._roll_back.after_load(source)
            self._first_save.allow()
            if source is not None:
                self._continue_from(source)
            unless_loaded.pop_all()
        for each in self._companions:
            each.loaded(source)
        self._maker.trained.restart()
        self.preempted_by = self._departure.untrained(self.loaded_step or 0)
        return source is not None

    def roll_back(self, step: int, reason: str, *, max_rollbacks: int = 3, within_steps: int = 1000) -> int:
        """Roll back, because `step` is not to be kept, to the latest good checkpoint before it; return its step.

        Call it before `save(step)`, for instance where a loss is not finite. What is loaded is undamaged and finite,
        and the steps after it belong to a branch that the run has left. From then on the run skips the batch of `step`,
        or if it rolled back from there before, the one before those that it skipped then: `batches_to_skip` says when.
        It is on record in the folder: after a kill, `load` rolls back, too.

        Raises `TrainingDiverged`, with what was tried, if the run rolled back `max_rollbacks` times from the last
        `within_steps` steps, or if there is no such checkpoint or batch; nothing is changed then. Raises ConfigError
        without checkpoints, with `load_only`, for a wrong argument, and what `load` raises. Sets `loaded_step`, and
        `preempted_by`.
        """
        step = arguments.checked_step("roll_back", step, 1)
        limit = Limit(*arguments.checked_rollback(reason, max_rollbacks, within_steps))
        if not self._opened() or self._config.load_only:
            raise ConfigError(f"roll_back({step}): expected a run that saves. Unset load_only, and enable checkpoints.")
        self._first_save.check()
        self._settle()
        self._roll_back.begin(step, reason, self._maker.origin.lineage, limit)
        source = self._roll_back.load()
        for each in self._companions:
            each.rolled_back(source.step)
        self._continue_from(source)
        self._maker.trained.restart()
        self.preempted_by = self._departure.untrained(source.step)
        return source.step

    def batches_to_skip(self, step: int) -> int:
        """Return how many batches the loop has to drop before it takes that of `step`: 0 unless the run rolled back.

        A batch is what a step takes from the data. The answer is the same in every start. Any rank.
        """
        return batches_to_skip(step, self._rollbacks)

    def would_import(self) -> Path | None:
        """Return the weights that `load` would import first, None for none (`initial_load_in_hf`). Changes nothing.

        Like `dry_run`, takes no lease: another job may have the folder.
        """
        return self._initial_import.due() if self._config.enable_checkpoint else None

    def dry_run(self) -> ResumeReport | None:
        """Return what `load` would do and refuse, None for a fresh start. Changes nothing of the run or on disk.

        Reads no tensors, and takes no lease. Raises as `load` does for a step that cannot be chosen.
        """
        return self._load.report() if self._config.enable_checkpoint else None

    def save(self, curr_step: int, force: bool = False, *, now: bool = False, metrics: Metrics | None = None) -> bool:
        """Call at the end of every step: save if a save is due, wanted (`now`, `force`), or if the ranks leave.

        `now` saves this step whatever the interval, as an interval would: in the background in the asynchronous modes
        (the end of an epoch, a best metric). `force` is for the last step: what it saves is durable on return, as is a
        save before leaving; both raise `SaveFailed` if a second try fails too. All ranks give the same arguments.
        Return True if this step was saved or is being saved.

        `metrics` of this step (numbers, or tensors of one element, which are read only if the step is saved) are
        recorded in the checkpoint, rank 0's, for `keep_best_k`; one that is not finite is left out.
        """
        curr_step = arguments.checked_step("save", curr_step)
        check_metrics(metrics or {})
        if not self._opened():
            return False
        self._run.at_step(curr_step)
        self._first_save.check()
        self._start_processes("save")
        self._maker.note_metrics(metrics or {})
        saved, self.preempted_by = self._decider.end_of_step(curr_step, last=force, now=now)
        if force and saved:
            self._end.write_hugging_face(curr_step)
            self._note_finished()
        return saved

    def wait(self) -> int:
        """Wait until no save is in flight and return the step saved last since the last load, -1 if none was.

        Raises `SaveFailed` if the save in flight failed and was one too many in a row.
        """
        if not self._opened():
            return -1
        self._in_flight.settle()
        return self._peers.on_coordinator(lambda: -1 if (last := self._in_flight.last_durable) is None else last)

    def maybe_wait_for_staging(self) -> None:
        """Wait until the state may change: call right before the optimizer's step. Any rank; raises `SaveFailed`."""
        self._in_flight.wait_for_staging()
        for each in self._companions:
            each.wait_for_staging()
        self._comparison.wait()

    def reset(self) -> None:
        """Begin to count the seconds of training, and prepare saves unless the load was from memory.

        Call it right before the loop. Returns while a thread allocates the memory for copies and the writer process
        starts. Raises `RunNotLoaded` if the folder has steps and `load` was not called, and what that start raises.
        """
        if self._opened():
            self._first_save.check()
            if not self._maker.is_from_memory:  # Else the arenas are there, and the rest can wait.
                self._start_processes("reset")
                self._maker.prepare(self.loaded_step or 0, now=False)
        self._maker.trained.restart()

    def latest_step(self) -> int:
        """Wait for the save in flight; return the latest committed step of the run, full or weights only, -1 for none.

        Raises `SaveFailed` as `wait` does.
        """
        if not self._opened():
            return -1
        self._in_flight.settle()
        return self._peers.on_coordinator(lambda: latest_step(self._store, self._config))

    def ended(self) -> Ended | None:
        """Return how the run ended if nothing is left to train, save or export, else None.

        Changes nothing, and takes no lease. The last step is `training.steps` of the config.
        """
        ended, lacks_hugging_face = self._end.found()
        return None if lacks_hugging_face else ended

    def lacks_only_hugging_face(self) -> bool:
        """Return whether the run has ended and lacks only its weights in Hugging Face's format. Changes nothing."""
        return self._end.found()[1]

    def finish_ended(self) -> None:
        """Write what a run that has ended still lacks and what needs no load, and free what it has in memory. Uploads.

        Does nothing for a run that has not ended. Durable on return; raises `SaveFailed`.
        """
        ended, lacks_hugging_face = self._end.found() if self._opened() else (None, False)
        if ended is not None:
            self._note_finished()
            if lacks_hugging_face:
                self._end.write_hugging_face(ended.step)

    def finish(self, step: int) -> None:
        """Save and export what of `step`, the last one, is missing; nothing if the ranks leave for a signal.

        Durable on return. Raises `SaveFailed`, `RunNotLoaded` without a load, and ConfigError for a step that the loop
        has passed.
        """
        step = arguments.checked_step("finish", step)
        if self._opened() and not self._config.load_only:
            self._first_save.check()
            if self._decider.finish(step, leaving_for=self.preempted_by):
                self._note_finished()
                self._end.write_missing(step)

    def close(self) -> None:
        """Wait for the save in flight, report how it ended, end threads and processes, and give the folder up.

        Waits at most `timeout_seconds` for each of them. With an `upload_folder` waits until all is there, as long as
        something is sent within `timeout_seconds`. Raises `SaveFailed` if that save failed and was one too many in a
        row, and `UploadRefused`; all but the process groups is closed then, too, and these by a second call.
        Idempotent; any other call opens the manager again.
        """
        self._close(is_cut=False)

    def _close(self, *, is_cut: bool, has_lost: bool = False) -> None:
        if self._is_open:
            self._is_open = self._has_started_saver = self._maker.is_prepared = False
            self._end_all(is_cut=is_cut, has_lost=has_lost)
        for groups in () if has_lost else self._own_groups:  # If something failed, a rank may still be in an exchange.
            groups.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._close(is_cut=error is not None, has_lost=error is not None and as_peer_lost(error) is not None)
        except Exception as closing:
            if error is None:
                raise
            logger.warning("While leaving after an error, the checkpoint manager could not close: %s", closing)

    def _opened(self, *, again: bool = False, step: int = -1) -> bool:
        """Open the manager unless it is open; return False if checkpoints are off, and nothing is to be done.

        Raises ConfigError if another manager of this process took its place, unless this is to be the one `again`.
        """
        if not self._config.enable_checkpoint:
            return False
        if not self._is_open:
            arguments.refuse_dry_run(self._config)
            if not again:
                self._opener.refuse_if_replaced()
            self._is_open = True
            try:
                self._take(step)
            except BaseException:
                self._close(is_cut=True)
                raise
        return True

    def _take(self, step: int) -> None:
        """Take the folders and watch signals. **Collective**; what fails on one rank is raised on all.

        `step` is what is to be loaded, -1 for what the config says.
        """
        if not self._config.load_only:
            self._opener.open()
        with naming_missing_ranks("the first call of the checkpoint manager"):
            self._peers.together(self._preemption.start)
        clock = clock_around(lambda: self._peers.together(self._hooks.start))
        self._run.optimizer.refuse_where_parts_differ(self._peers)
        tokens = self._peers.on_coordinator(lambda: self._take_folders(step))
        refuse_misfits(self._folders, tokens, self._job_config, clock, self._peers)
        if not self._config.load_only:
            self._end.refuse_foreign_folder()
            for each in self._companions:
                self._maker.origin = each.begin(self._maker.origin)

    def _take_folders(self, step: int) -> list[str]:
        refuse_wrong_folders(self._folders, self._config, step)
        return [] if self._config.load_only else self._folders.take()

    def _end_all(self, *, is_cut: bool, has_lost: bool) -> None:
        """Wait for the save in flight, end threads and processes, and release the folders, even if some of it fails.

        Companions have no time if the run `is_cut` by an error. If it `has_lost` a rank, no flags are waited for.
        """
        # Called from the last to the first, even if one of them raises. The folders are released only when no thread
        # and no process of this job writes into them, or one did not end in time: its commit then finds the lease gone.
        with ExitStack() as in_reverse:
            in_reverse.callback(self._opener.note_closed)
            in_reverse.callback(self._folders.release)
            in_reverse.callback(self._first_save.leave, self._store.check_lease)
            in_reverse.callback(self._preemption.close)
            in_reverse.callback(self._housekeeping.close, self._config.timeout_seconds)
            for each in self._companions:
                in_reverse.callback(each.leave, (lambda: 0.0) if is_cut else self._seconds_left)
            in_reverse.callback(self._close_saver)
            for each in self._companions:
                in_reverse.callback(each.close)
            in_reverse.callback(self._hooks.close)
            in_reverse.callback(self._in_flight.settle)
            if not has_lost:
                in_reverse.callback(self._decider.drain)

    def _seconds_left(self) -> float:
        """Return the seconds of the grace period that companions may use; infinity until a signal comes."""
        return self._preemption.seconds_left() - _SECONDS_TO_LEAVE

    def _close_saver(self) -> None:
        # A save that was not over in time is not awaited twice: the other ranks wait for this one to leave.
        self._saver.close(0 if self._peers.is_group_in_doubt else self._config.timeout_seconds)

    def _start_processes(self, caller: str) -> None:
        """Start the saver and the companions unless that is done. **Collective**.

        Right before the loop or after its first step: their starts would take a core from a load, or from a copy.
        """
        if not (self._has_started_saver or self._config.load_only):
            self._has_started_saver = True
            with naming_missing_ranks(f"the first {caller}() of the checkpoint manager"):
                self._peers.together(self._saver.start)
            for each in self._companions:
                each.start(self._maker.origin.lineage.run_id)

    def _note_finished(self) -> None:
        for each in self._companions:
            each.finished(self._maker.origin.lineage.run_id)

    def _forget(self) -> None:
        """Have nothing open in a child that was just forked: closing it there touches nothing of the parent's."""
        self._is_open, self._own_groups = False, []

    def _settle(self) -> None:
        """Wait for all that still reads the state, or changes the folder."""
        self._in_flight.settle()
        for each in self._companions:
            each.settle()
        self._comparison.wait()
        self._housekeeping.wait(self._config.timeout_seconds)

    def _continue_from(self, source: LoadSource) -> None:
        self._rollbacks = source.rollbacks
        self._maker.continue_from(source)
        self._in_flight.forget_lineage()
        self.loaded_step = source.continues_at
        if source.is_proof:
            self._housekeeping.note_good(source.step)
        self._maker.secure(source.step)
        self._decider.continue_from(source.continues_at)
