"""The order in which a run is loaded, saved and left; each question is answered in a room of its own.

The manager composes a save policy, a saver, a store, a retention policy and the ranks' consensus; it knows no file
name, no clock and no mode. At most one save is in flight. A failed save is logged, counted and tried again at the next
interval; `max_failed_saves` in a row end the run. Every public method is **collective** unless it says otherwise.
"""

from __future__ import annotations

import os
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

from torchtitan_lite.checkpoint.hugging_face.description import HuggingFaceModel
from torchtitan_lite.checkpoint.hugging_face.last_save import build_last_save
from torchtitan_lite.checkpoint.resume.ending import Ended, ended_run, export_of
from torchtitan_lite.checkpoint.resume.first_save import FirstSave
from torchtitan_lite.checkpoint.resume.initial_import import ImportWeights, InitialImport
from torchtitan_lite.checkpoint.resume.load_source import LoadSource, latest_step, new_run
from torchtitan_lite.checkpoint.resume.resume_report import ResumeReport
from torchtitan_lite.checkpoint.resume.run_load import RunLoad
from torchtitan_lite.checkpoint.saving.auto_interval import build_auto_interval
from torchtitan_lite.checkpoint.saving.departure import Departure
from torchtitan_lite.checkpoint.saving.in_flight import build_in_flight
from torchtitan_lite.checkpoint.saving.measured import Metrics, check_metrics
from torchtitan_lite.checkpoint.saving.replicas import build_replicas
from torchtitan_lite.checkpoint.saving.run_memory import build_run_memory
from torchtitan_lite.checkpoint.saving.run_saves import RunSaves
from torchtitan_lite.checkpoint.saving.save_plan import PlanCache
from torchtitan_lite.checkpoint.saving.savers import Saver, SyncSaver, build_saver
from torchtitan_lite.checkpoint.saving.step_saves import StepSaves
from torchtitan_lite.checkpoint.saving.writer import Origin
from torchtitan_lite.checkpoint.schedule.failures import Past
from torchtitan_lite.checkpoint.schedule.interval import SavePolicy, build_save_policy
from torchtitan_lite.checkpoint.schedule.preemption import PreemptionWatch
from torchtitan_lite.checkpoint.staging.guard import StagingGuard
from torchtitan_lite.checkpoint.state import arguments
from torchtitan_lite.checkpoint.state.run_state import RunState
from torchtitan_lite.checkpoint.state.stateful import Stateful
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.config.own_loop import loop_config
from torchtitan_lite.disk.forks import forget_in_children
from torchtitan_lite.distributed.consensus import Peers, StepConsensus
from torchtitan_lite.log import logger
from torchtitan_lite.store.housekeeping import OnEvent, build_housekeeping, ignore_event
from torchtitan_lite.store.retention import RetentionPolicy, build_retention
from torchtitan_lite.store.run_folders import RunFolders
from torchtitan_lite.store.store import CheckpointStore


class CheckpointManager:
    """Save and load a run: model, optimizers, LR schedulers, dataloader and any further `Stateful`s in `states`.

    Model, optimizers and schedulers are one object or a list; of the last two there may be none. Raises ConfigError
    for an argument that is something else. `for_loop` makes one from keywords; this is torchtitan's constructor.

    The constructor touches nothing; `load`, `save` or `reset` open what is needed. Use the manager in a `with`
    statement, or call `close`.
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
        hugging_face: HuggingFaceModel | None = None,
        import_weights: ImportWeights | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_event: OnEvent | None = None,
        past: Callable[[], Past] | None = None,
    ) -> None:
        arguments.check_arguments(dataloader, states, job_config)
        config, on_event = job_config.checkpoint, on_event or ignore_event
        timeout = timedelta(seconds=config.timeout_seconds)
        lineage, peers = new_run(), peers or Peers(timeout)
        topology = topology or f"{peers.world_size} ranks"
        run = RunState(dataloader, model_parts, optimizers, lr_schedulers, states, config.save_trained_only)
        folders = RunFolders(job_config, lineage.run_id, store)
        plans = PlanCache(peers, build_replicas(run.model.parameter_names, run.small))
        memory = self._memory = build_run_memory(config, folders.checkpoints, plans, peers, clock, on_event)
        saver, at_once = saver or build_saver(config, peers, plans, memory.images), SyncSaver(peers, plans)
        watch = preemption or PreemptionWatch(config.preemption_signals, config.preemption_grace_seconds)
        housekeeping = build_housekeeping(config, retention or build_retention(config), on_event)
        in_flight = build_in_flight(config, peers, housekeeping, clock, on_event)
        origin = Origin(lineage, topology, job_config.to_dict(), config.tensor_digests)
        saves = RunSaves(run, folders, in_flight, saver, at_once, config, origin, peers, clock, on_event, memory.images)
        departure = Departure(watch, saves, in_flight, peers, on_event)
        policy, consensus = save_policy or build_save_policy(config), consensus or StepConsensus(timeout)
        self._job_config, self._config, self._peers, self._run = job_config, config, peers, run
        self._folders, self._store, self._saver, self._preemption = folders, folders.checkpoints, saver, watch
        self._housekeeping, self._in_flight, self._saves, self._departure = housekeeping, in_flight, saves, departure
        self._first_save = FirstSave(self._store, config, peers)
        self._initial_import = InitialImport(self._store, config, import_weights, peers, clock, on_event)
        self._load = RunLoad(run, self._store, job_config, topology, peers, clock, on_event, memory.tier)
        auto = build_auto_interval(config, in_flight, peers, clock, past or Past)
        self._step_saves = StepSaves(policy, config, saves, in_flight, watch, departure, consensus, auto, peers, clock)
        self._last_save = build_last_save(job_config, run, hugging_face, folders, peers, clock, on_event)
        self._guard = StagingGuard(run.optimizers, self.maybe_wait_for_staging)
        self._is_open = self._has_started_saver = False
        self.loaded_step: int | None = None
        """The step that `load` resumed from; None for a fresh start."""
        self.preempted_by = 0
        """The signal that the ranks agreed to leave for, after `save` saved or before training; 0 for none."""
        if config.enable_checkpoint:
            logger.info("Checkpointing active. Checkpoints will be loaded from and saved to %s", self._store.root)

    @classmethod
    def for_loop(
        cls,
        *,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        lr_scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        dataloader: Stateful | None = None,
        states: Mapping[str, Stateful] | None = None,
        folder: str | os.PathLike[str] = "outputs/checkpoint",
        hugging_face: HuggingFaceModel | None = None,
        on_event: OnEvent | None = None,
        **checkpoint: Any,
    ) -> CheckpointManager:
        """Return the manager of a training loop of your own; `checkpoint` takes any key of `[checkpoint]`.

        Checkpoints are enabled unless `enable_checkpoint=False` is given. `folder` holds the `step-N` folders.
        `last_save_in_hf` needs `hugging_face`, which says where each tensor is in Hugging Face's files. Raises
        ConfigError for an unknown key, a wrong value or a wrong object. Any rank.
        """
        config = loop_config(folder, checkpoint)
        return cls(
            dataloader, model, optimizer, lr_scheduler, states, config, hugging_face=hugging_face, on_event=on_event
        )

    def open(self) -> None:
        """Take the folder for this job and watch signals; the other methods do so too. Raises `FolderInUse`."""
        self._opened()

    def load(self, step: int = -1) -> bool:
        """Load `step`, by default what the config says: `load_step`, the latest, or `initial_load_path`.

        Skip a damaged checkpoint for the next older one. Return False for a fresh start, which changes nothing. Raises
        `CheckpointNotFound`, `CheckpointMismatch` and what a state refuses with, on every rank, before the model is
        touched, and `AllCheckpointsDamaged`. Sets `preempted_by` if a rank received a signal.
        """
        if not self._opened():
            return False
        self._in_flight.settle()
        self._housekeeping.wait(self._config.timeout_seconds)
        if step == -1:
            self._initial_import.run()
        source = self._load.load(step)
        self._first_save.allow()
        if source is not None:
            self._continue_from(source)
        self._memory.take_over(self._load.take_over(source))
        self.preempted_by = self._departure.untrained(self.loaded_step or 0)
        return source is not None

    def would_import(self) -> Path | None:
        """Return the weights that `load` would import first, None for none (`initial_load_in_hf`). Changes nothing."""
        return self._initial_import.due() if self._config.enable_checkpoint else None

    def dry_run(self) -> ResumeReport | None:
        """Return what `load` would do and refuse, None for a fresh start. Changes nothing of the run or on disk."""
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
        check_metrics(metrics or {})
        if not self._opened():
            return False
        self._saves.note_metrics(metrics or {})
        self._first_save.check()
        self._memory.begin_keeping()
        if not (self._has_started_saver or self._config.load_only):  # Not beside a load: a start takes a core.
            self._has_started_saver = True
            self._peers.together(self._saver.start)
        saved, self.preempted_by = self._step_saves.end_of_step(curr_step, last=force, now=now)
        if force and saved and self._last_save is not None:
            self._last_save.write(curr_step)
        if force and saved:
            self._memory.finish()
        return saved

    def wait(self) -> int:
        """Wait until no save is in flight and return the step saved last by this manager, -1 if none was.

        Raises `SaveFailed` if the save in flight failed and was one too many in a row.
        """
        if not self._opened():
            return -1
        self._in_flight.settle()
        return self._peers.on_coordinator(lambda: -1 if (last := self._in_flight.last_durable) is None else last)

    def maybe_wait_for_staging(self) -> None:
        """Wait until the state may change: call right before the optimizer's step. Not collective."""
        self._in_flight.wait_for_staging()
        self._memory.wait_for_staging()

    def reset(self) -> None:
        """Start the clock of intervals in seconds: call right before the loop."""
        if self._opened():
            self._first_save.check()
            if self._saves.origin.resumed_from_memory is None:  # Else the arenas are there: the plan can wait a step.
                self._saves.prepare(self.loaded_step or 0, now=False)
        self._saves.leave_out(self.loaded_step or 0)

    def latest_step(self) -> int:
        """Return the latest committed step, full or weights only, that `load` could take; -1 if there is none."""
        if not self._opened():
            return -1
        self._in_flight.settle()
        return self._peers.on_coordinator(lambda: latest_step(self._store, self._config))

    def ended(self) -> Ended | None:
        """Return how the run ended if nothing is left to train, save or export, else None. Changes nothing."""
        ended, lacks_last_save = self._peers.on_coordinator(self._ending)
        return None if lacks_last_save else ended

    def lacks_only_hugging_face(self) -> bool:
        """Return whether the run has ended and lacks only its weights in Hugging Face's format. Changes nothing."""
        return self._peers.on_coordinator(self._ending)[1]

    def finish_ended(self) -> None:
        """Write what a run that has ended still lacks and what needs no load, and free what it has in memory."""
        ended, lacks_last_save = self._peers.on_coordinator(self._ending) if self._opened() else (None, False)
        if ended is not None:
            self._memory.finish()
            if lacks_last_save and self._last_save is not None and not self._config.load_only:
                self._last_save.write(ended.step)

    def finish(self, step: int) -> None:
        """Save and export what a run loaded at `step`, its last one, has not yet. Durable; raises `SaveFailed`."""
        self._saves.catch_up(step)
        self._memory.finish()
        export, last_save = self._folders.exports, self._last_save
        if (export is None and last_save is None) or self._config.load_only or not self._opened():
            return
        self._first_save.check()
        self._in_flight.settle()
        if export is not None and self._peers.on_coordinator(
            lambda: export_of(step, self._saves.origin.lineage.run_id, export, self._job_config) is None
        ):
            self._saves.export(step)
        if last_save is not None and not self._peers.on_coordinator(lambda: last_save.made(self._store.get(step))):
            last_save.write(step)

    def close(self) -> None:
        """Wait for the save in flight, report how it ended, and end threads and processes. Idempotent."""
        if not self._is_open:
            return
        self._is_open = self._has_started_saver = False
        with ExitStack() as in_reverse:
            in_reverse.callback(self._folders.release)
            in_reverse.callback(self._preemption.close)
            in_reverse.callback(self._housekeeping.close, self._config.timeout_seconds)
            in_reverse.callback(self._memory.leave)
            in_reverse.callback(self._saver.close, self._config.timeout_seconds)
            in_reverse.callback(self._memory.close)
            in_reverse.callback(self._guard.close)
            in_reverse.callback(self._in_flight.settle)
            in_reverse.callback(self._step_saves.drain)

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

    def _opened(self) -> bool:
        """Open the manager unless it is open; return False if checkpoints are off, and nothing is to be done."""
        if not self._config.enable_checkpoint:
            return False
        if not self._is_open:
            arguments.refuse_dry_run(self._config)
            self._is_open = True
            forget_in_children(self._forget)
            try:
                self._start()
            except BaseException:
                self.close()
                raise
        return True

    def _start(self) -> None:
        self._preemption.start()
        self._guard.start()
        self._run.optimizer.refuse_where_parts_differ(self._peers)
        if not self._config.load_only:
            self._peers.on_coordinator(self._folders.take)
            if self._last_save is not None:
                self._peers.on_coordinator(self._last_save.refuse_foreign_folder)
            self._saves.origin = self._memory.begin(self._saves.origin)

    def _forget(self) -> None:
        """Have nothing open in a child that was just forked: closing it there touches nothing of the parent's."""
        self._is_open = False

    def _ending(self) -> tuple[Ended | None, bool]:
        """Return how the run ended, and whether its last save in Hugging Face's format is missing. Coordinator only."""
        if not self._config.enable_checkpoint:
            return None, False
        ended = ended_run(self._store, self._folders.exports, self._job_config)
        if ended is None or ended.last is None or self._last_save is None:
            return ended, False
        return ended.also_in(self._last_save.root), not self._last_save.made(ended.last)

    def _continue_from(self, source: LoadSource) -> None:
        self._saves.continue_from(source.lineage, None if source.memory is None else source.step)
        self._in_flight.forget_lineage()
        self.loaded_step = source.continues_at
        if not source.initial and not source.has_nan and source.memory is None:
            self._housekeeping.note_good(source.step)
        if self._memory.images is None:
            self._saves.secure(source.step)  # Before it goes: this start keeps nothing in memory.
