"""The parts of a manager, each of which answers one question, and how they are tied to one another.

A part that a caller hands in (`Seams`) takes the place of the one that the configuration names. Nothing here touches a
folder, a process or a signal: the manager's methods do, through the parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchtitan_lite.checkpoint.companions import build_companions
from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.one_folder import seen_folders
from torchtitan_lite.checkpoint.one_opener import OneOpener
from torchtitan_lite.checkpoint.planning.plan_cache import PlanCache
from torchtitan_lite.checkpoint.planning.rank_comparison import RankComparison
from torchtitan_lite.checkpoint.planning.replicas import build_replicas
from torchtitan_lite.checkpoint.resume.first_save import FirstSave
from torchtitan_lite.checkpoint.resume.initial_import import ImportWeights, InitialImport
from torchtitan_lite.checkpoint.resume.load_source import new_run
from torchtitan_lite.checkpoint.resume.roll_back import RollBack
from torchtitan_lite.checkpoint.resume.run_load import RunLoad
from torchtitan_lite.checkpoint.resume.wrong_folder import refuse_wrong_folders
from torchtitan_lite.checkpoint.run_end import LastFormat, RunEnd, build_last_save
from torchtitan_lite.checkpoint.run_folders import RunFolders
from torchtitan_lite.checkpoint.saving.auto_interval import build_auto_interval
from torchtitan_lite.checkpoint.saving.companion import Companion, heard_by, protected_by, sources_of
from torchtitan_lite.checkpoint.saving.decider import SaveDecider
from torchtitan_lite.checkpoint.saving.departure import Departure
from torchtitan_lite.checkpoint.saving.maker import SaveMaker, Savers
from torchtitan_lite.checkpoint.saving.savers import Saver, SyncSaver, build_saver
from torchtitan_lite.checkpoint.saving.waiter import SaveWaiter, build_waiter
from torchtitan_lite.checkpoint.saving.writer import Origin
from torchtitan_lite.checkpoint.schedule.failures import Past
from torchtitan_lite.checkpoint.schedule.interval import SavePolicy, build_save_policy
from torchtitan_lite.checkpoint.schedule.preemption import PreemptionWatch
from torchtitan_lite.checkpoint.state import arguments
from torchtitan_lite.checkpoint.state.run_state import RunState
from torchtitan_lite.checkpoint.state.stateful import Stateful
from torchtitan_lite.checkpoint.state.step_hooks import StepHooks
from torchtitan_lite.config.job_config import Checkpoint, JobConfig
from torchtitan_lite.distributed.misfits import HostView, SharedFolder, alike, build_facts, clock_around, facts_of
from torchtitan_lite.distributed.missing_ranks import naming_missing_ranks
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.distributed.step_consensus import StepConsensus
from torchtitan_lite.events import EventListener, emit_to
from torchtitan_lite.store.housekeeping import Housekeeping, build_housekeeping
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.store.retention import RetentionPolicy, build_retention

RunObjects = tuple[
    Stateful | None,
    nn.Module | Sequence[nn.Module],
    Optimizer | Sequence[Optimizer] | None,
    LRScheduler | Sequence[LRScheduler] | None,
    Mapping[str, Stateful | dict[Any, Any]] | None,
]
"""Dataloader, model parts, optimizers, LR schedulers and further states."""


_SECONDS_TO_LEAVE = 5.0
"""Of the grace period, for what comes after the uploads."""


@dataclass(frozen=True)
class Seams:
    """What a caller may hand in; None for what the configuration names."""

    store: StoresCheckpoints | None
    saver: Saver | None
    save_policy: SavePolicy | None
    retention: RetentionPolicy | None
    consensus: StepConsensus | None
    peers: Peers | None
    preemption: PreemptionWatch | None
    clock: Callable[[], float]
    on_event: EventListener | None
    past: Callable[[], Past] | None


@dataclass(frozen=True)
class Parts:
    """The parts, each under the name of its question."""

    config: Checkpoint
    job_config: JobConfig
    run: RunState
    peers: Peers
    own_groups: Sequence[Peers | StepConsensus]
    """Those that the caller did not hand in: the manager closes them."""
    folders: RunFolders
    store: StoresCheckpoints
    saver: Saver
    companions: Sequence[Companion]
    preemption: PreemptionWatch
    housekeeping: Housekeeping
    waiter: SaveWaiter
    comparison: RankComparison
    maker: SaveMaker
    departure: Departure
    first_save: FirstSave
    initial_import: InitialImport
    load: RunLoad
    roll_back: RollBack
    decider: SaveDecider
    end_of_run: RunEnd

    def start(self, hooks: StepHooks, opener: OneOpener, step: int) -> None:
        """Take the folders and watch signals. **Collective**; what fails on one rank is raised on all.

        `step` is what is to be loaded, -1 for what the config says.
        """
        if not self.config.load_only:
            opener.open()
        with naming_missing_ranks("the first call of the checkpoint manager"):
            self.peers.together(self.preemption.start)
        clock = clock_around(lambda: self.peers.together(hooks.start))
        self.run.optimizer.refuse_where_parts_differ(self.peers)
        tokens = self.peers.on_coordinator(lambda: self._take_folders(step))
        alike(lambda: self._seen(tokens), partial(self._view, clock), self.peers)
        if not self.config.load_only:
            self.end_of_run.refuse_foreign_folder()
            for each in self.companions:
                self.maker.origin = each.begin(self.maker.origin)

    def end(self, hooks: StepHooks, opener: OneOpener, *, is_cut: bool) -> None:
        """Wait for the save in flight, end threads and processes, and give the folders up, whatever of it fails.

        Companions have no time for what is left to do if the run `is_cut` by an error.
        """
        # Called from the last to the first, whatever one of them raises. The folders are released only when no thread
        # and no process of this job writes into them.
        with ExitStack() as in_reverse:
            in_reverse.callback(opener.note_closed)
            in_reverse.callback(self.folders.release)
            in_reverse.callback(self.first_save.leave, self.folders.fence(self.folders.checkpoints))
            in_reverse.callback(self.preemption.close)
            in_reverse.callback(self.housekeeping.close, self.config.timeout_seconds)
            for each in self.companions:
                in_reverse.callback(each.leave, float if is_cut else self._seconds_left)
            in_reverse.callback(self._close_saver)
            for each in self.companions:
                in_reverse.callback(each.close)
            in_reverse.callback(hooks.close)
            in_reverse.callback(self.waiter.settle)
            in_reverse.callback(self.decider.drain)

    def _seen(self, tokens: Sequence[str]) -> list[SharedFolder]:
        return seen_folders(self.folders, tokens, timeout_seconds=self.config.timeout_seconds)

    def _view(self, clock: tuple[float, float], folders: Sequence[SharedFolder]) -> HostView:
        needs_clock = self.config.keep_for_hours > 0 or not self.folders.are_all_on_disk
        return HostView({**facts_of(self.job_config), **build_facts()}, folders, clock=clock, needs_clock=needs_clock)

    def _take_folders(self, step: int) -> list[str]:
        refuse_wrong_folders(self.folders, self.config, step)
        return [] if self.config.load_only else self.folders.take()

    def _seconds_left(self) -> float:
        """Return the seconds of the grace period that companions may use; infinity until a signal comes."""
        return self.preemption.seconds_left() - _SECONDS_TO_LEAVE

    def _close_saver(self) -> None:
        # A save that was not over in time is not awaited twice: the other ranks wait for this one to leave.
        self.saver.close(0 if self.peers.is_group_in_doubt else self.config.timeout_seconds)


def build_parts(
    objects: RunObjects,
    job_config: JobConfig,
    seams: Seams,
    *,
    topology: str | None,
    hugging_face: LastFormat | None,
    import_weights: ImportWeights | None,
    ranks_may_differ: bool,
) -> Parts:
    """Return the parts for the run of `objects`. Raises ConfigError for one that is something else. Any rank."""
    dataloader, *_, states = objects
    arguments.check_arguments(dataloader, states, job_config)
    arguments.check_policies(seams.save_policy, seams.retention)
    config = job_config.checkpoint
    timeout, lineage = timedelta(seconds=config.timeout_seconds), new_run()
    peers, consensus = seams.peers or Peers(timeout), seams.consensus or StepConsensus(timeout)
    emit = emit_to(seams.on_event)
    context = RunContext(config, peers, seams.clock, emit)
    topology = topology or f"{peers.world_size} ranks"
    run = RunState(*objects, config.save_trained_only)
    folders = RunFolders(job_config, lineage.run_id, seams.store)
    retention = seams.retention or build_retention(config)
    comparison = RankComparison(peers, may_differ=ranks_may_differ, watches="replicas" in config.digest_tensors)
    replicas = build_replicas(run.model.parameter_names, run.small)
    plans = PlanCache(peers, replicas, comparison, states_of_ranks=run.states_of_ranks)
    rules = None if seams.retention is not None else retention
    companions = build_companions(folders, rules, plans, context)
    saver = seams.saver or build_saver(config, peers, plans, companions)
    watch = seams.preemption or PreemptionWatch(config.preemption_signals, config.preemption_grace_seconds)
    context = dataclasses.replace(context, emit=heard_by(companions, emit))
    housekeeping = build_housekeeping(config, retention, context.emit, partial(protected_by, companions))
    waiter = build_waiter(housekeeping, context)
    origin = build_origin(job_config, lineage, topology)
    savers = Savers(saver, SyncSaver(peers, plans))
    maker = SaveMaker(run, folders, waiter, savers, origin, context, companions)
    departure = Departure(watch, maker, waiter, context)
    policy = build_save_policy(config, seams.save_policy)
    auto = build_auto_interval(waiter, seams.past or Past, context)
    sources = sources_of(companions)
    load = RunLoad(run, folders, job_config, topology, sources, context)
    last_save = build_last_save(hugging_face, job_config, run, folders, context)
    return Parts(
        config=config,
        job_config=job_config,
        run=run,
        peers=peers,
        own_groups=[each for each in (peers, consensus) if each not in (seams.peers, seams.consensus)],
        folders=folders,
        store=folders.checkpoints,
        saver=saver,
        companions=companions,
        preemption=watch,
        housekeeping=housekeeping,
        waiter=waiter,
        comparison=comparison,
        maker=maker,
        departure=departure,
        first_save=FirstSave(folders.checkpoints, config, peers),
        initial_import=InitialImport(folders.checkpoints, import_weights, context, sources.has_checkpoint),
        load=load,
        roll_back=RollBack(folders, load, run, context),
        decider=SaveDecider(policy, maker, waiter, departure, consensus, auto, context),
        end_of_run=RunEnd(job_config, folders, maker, last_save, peers),
    )


def build_origin(job_config: JobConfig, lineage: Lineage, topology: str) -> Origin:
    """Return what manifests record of the run, before it has loaded."""
    config = job_config.checkpoint
    return Origin(
        lineage,
        topology,
        job_config.to_dict(),
        tensor_digests="save" in config.digest_tensors,
        dcp_metadata=config.dcp_metadata,
    )
