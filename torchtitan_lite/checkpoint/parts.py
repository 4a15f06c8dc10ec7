"""The parts of a manager, each of which answers one question, and how they are tied to one another.

A part that a caller hands in (`Seams`) takes the place of the one that the configuration names. Nothing here touches a
folder, a process or a signal: the manager's methods do, through the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchtitan_lite.checkpoint.hugging_face.description import HuggingFaceModel
from torchtitan_lite.checkpoint.hugging_face.last_save import build_last_save
from torchtitan_lite.checkpoint.one_folder import refuse_where_not_shared
from torchtitan_lite.checkpoint.one_opener import OneOpener
from torchtitan_lite.checkpoint.resume.first_save import FirstSave
from torchtitan_lite.checkpoint.resume.initial_import import ImportWeights, InitialImport
from torchtitan_lite.checkpoint.resume.load_source import new_run
from torchtitan_lite.checkpoint.resume.run_load import RunLoad
from torchtitan_lite.checkpoint.resume.wrong_folder import refuse_wrong_folders
from torchtitan_lite.checkpoint.run_end import RunEnd
from torchtitan_lite.checkpoint.saving.auto_interval import build_auto_interval
from torchtitan_lite.checkpoint.saving.departure import Departure
from torchtitan_lite.checkpoint.saving.in_flight import InFlight, build_in_flight
from torchtitan_lite.checkpoint.saving.rank_comparison import RankComparison
from torchtitan_lite.checkpoint.saving.replicas import build_replicas
from torchtitan_lite.checkpoint.saving.run_memory import RunMemory, build_run_memory
from torchtitan_lite.checkpoint.saving.run_saves import RunSaves
from torchtitan_lite.checkpoint.saving.save_plan import PlanCache
from torchtitan_lite.checkpoint.saving.savers import Saver, SyncSaver, build_saver
from torchtitan_lite.checkpoint.saving.step_saves import StepSaves
from torchtitan_lite.checkpoint.saving.writer import Origin
from torchtitan_lite.checkpoint.schedule.failures import Past
from torchtitan_lite.checkpoint.schedule.interval import SavePolicy, build_save_policy
from torchtitan_lite.checkpoint.schedule.preemption import PreemptionWatch
from torchtitan_lite.checkpoint.state import arguments
from torchtitan_lite.checkpoint.state.run_state import RunState
from torchtitan_lite.checkpoint.state.stateful import Stateful
from torchtitan_lite.checkpoint.state.step_hooks import StepHooks
from torchtitan_lite.config.job_config import Checkpoint, JobConfig
from torchtitan_lite.distributed.missing_ranks import named_if_they_miss
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.distributed.step_consensus import StepConsensus
from torchtitan_lite.store.housekeeping import (
    Housekeeping,
    OnEvent,
    build_housekeeping,
    ignore_event,
    whose_errors_are_logged,
)
from torchtitan_lite.store.retention import RetentionPolicy, build_retention
from torchtitan_lite.store.run_folders import RunFolders
from torchtitan_lite.store.store import CheckpointStore

RunObjects = tuple[
    Stateful | None,
    nn.Module | Sequence[nn.Module],
    Optimizer | Sequence[Optimizer] | None,
    LRScheduler | Sequence[LRScheduler] | None,
    Mapping[str, Stateful | dict[Any, Any]] | None,
]
"""Dataloader, model parts, optimizers, LR schedulers and further states."""


@dataclass(frozen=True)
class Seams:
    """What a caller may hand in; None for what the configuration names."""

    store: CheckpointStore | None
    saver: Saver | None
    save_policy: SavePolicy | None
    retention: RetentionPolicy | None
    consensus: StepConsensus | None
    peers: Peers | None
    preemption: PreemptionWatch | None
    clock: Callable[[], float]
    on_event: OnEvent | None
    past: Callable[[], Past] | None


@dataclass(frozen=True)
class Parts:
    """The parts, each under the name of its question."""

    config: Checkpoint
    run: RunState
    peers: Peers
    own_groups: Sequence[Peers | StepConsensus]
    """Those that the caller did not hand in: the manager closes them."""
    folders: RunFolders
    store: CheckpointStore
    saver: Saver
    memory: RunMemory
    preemption: PreemptionWatch
    housekeeping: Housekeeping
    in_flight: InFlight
    comparison: RankComparison
    saves: RunSaves
    departure: Departure
    first_save: FirstSave
    initial_import: InitialImport
    load: RunLoad
    step_saves: StepSaves
    end_of_run: RunEnd

    def start(self, hooks: StepHooks, opener: OneOpener, step: int) -> None:
        """Take the folders and watch signals. **Collective**; what fails on one rank is raised on all.

        `step` is what is to be loaded, -1 for what the config says.
        """
        if not self.config.load_only:
            opener.open()
        with named_if_they_miss("the first call of the checkpoint manager"):
            self.peers.together(self.preemption.start)
        self.peers.together(hooks.start)
        self.run.optimizer.refuse_where_parts_differ(self.peers)
        tokens = self.peers.on_coordinator(lambda: self._take_folders(step))
        if not self.config.load_only:
            refuse_where_not_shared(self.folders, tokens, self.peers, timeout_seconds=self.config.timeout_seconds)
            self.end_of_run.refuse_foreign_folder()
            self.saves.origin = self.memory.begin(self.saves.origin)

    def end(self, hooks: StepHooks, opener: OneOpener) -> None:
        """Wait for the save in flight, end threads and processes, and give the folders up, whatever of it fails."""
        with ExitStack() as in_reverse:
            in_reverse.callback(opener.note_closed)
            in_reverse.callback(self.folders.release)
            in_reverse.callback(self.first_save.leave, self.folders.fence(self.folders.checkpoints))
            in_reverse.callback(self.preemption.close)
            in_reverse.callback(self.housekeeping.close, self.config.timeout_seconds)
            in_reverse.callback(self.memory.leave)
            in_reverse.callback(self._close_saver)
            in_reverse.callback(self.memory.close)
            in_reverse.callback(hooks.close)
            in_reverse.callback(self.in_flight.settle)
            in_reverse.callback(self.step_saves.drain)

    def _take_folders(self, step: int) -> list[str]:
        refuse_wrong_folders(self.folders, self.config, step)
        return [] if self.config.load_only else self.folders.take()

    def _close_saver(self) -> None:
        # A save that was not over in time is not awaited twice: the other ranks wait for this one to leave.
        self.saver.close(0 if self.peers.is_group_in_doubt else self.config.timeout_seconds)


def build_parts(
    objects: RunObjects,
    job_config: JobConfig,
    seams: Seams,
    *,
    topology: str | None,
    hugging_face: HuggingFaceModel | None,
    import_weights: ImportWeights | None,
    ranks_may_differ: bool,
) -> Parts:
    """Return the parts for the run of `objects`. Raises ConfigError for one that is something else. Any rank."""
    dataloader, *_, states = objects
    arguments.check_arguments(dataloader, states, job_config)
    config, clock = job_config.checkpoint, seams.clock
    on_event = whose_errors_are_logged(seams.on_event or ignore_event)
    timeout, lineage = timedelta(seconds=config.timeout_seconds), new_run()
    peers, consensus = seams.peers or Peers(timeout), seams.consensus or StepConsensus(timeout)
    topology = topology or f"{peers.world_size} ranks"
    run = RunState(*objects, config.save_trained_only)
    folders = RunFolders(job_config, lineage.run_id, seams.store)
    comparison = RankComparison(peers, may_differ=ranks_may_differ)
    store = folders.checkpoints
    plans = PlanCache(peers, build_replicas(run.model.parameter_names, run.small), comparison)
    memory = build_run_memory(config, store, plans, peers, clock, on_event)
    saver, at_once = seams.saver or build_saver(config, peers, plans, memory.images), SyncSaver(peers, plans)
    watch = seams.preemption or PreemptionWatch(config.preemption_signals, config.preemption_grace_seconds)
    housekeeping = build_housekeeping(config, seams.retention or build_retention(config), on_event)
    in_flight = build_in_flight(config, peers, housekeeping, clock, on_event)
    origin = Origin(lineage, topology, job_config.to_dict(), config.tensor_digests)
    saves = RunSaves(run, folders, in_flight, saver, at_once, config, origin, peers, clock, on_event, memory.images)
    departure = Departure(watch, saves, in_flight, peers, on_event)
    policy = seams.save_policy or build_save_policy(config)
    auto = build_auto_interval(config, in_flight, peers, clock, seams.past or Past, on_event)
    last_save = build_last_save(job_config, run, hugging_face, folders, peers, clock, on_event)
    return Parts(
        config=config,
        run=run,
        peers=peers,
        own_groups=[each for each in (peers, consensus) if each not in (seams.peers, seams.consensus)],
        folders=folders,
        store=store,
        saver=saver,
        memory=memory,
        preemption=watch,
        housekeeping=housekeeping,
        in_flight=in_flight,
        comparison=comparison,
        saves=saves,
        departure=departure,
        first_save=FirstSave(store, config, peers),
        initial_import=InitialImport(store, config, import_weights, peers, clock, on_event),
        load=RunLoad(run, folders, job_config, topology, peers, clock, on_event, memory.tier),
        step_saves=StepSaves(policy, config, saves, in_flight, watch, departure, consensus, auto, peers),
        end_of_run=RunEnd(job_config, folders, saves, last_save, peers),
    )
