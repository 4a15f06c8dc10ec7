"""The saves of a run: one at a time, in the background or durable on return.

The caller decides when to save. Every method is **collective** unless it says otherwise, because the ranks
make their states together: a state that fails on one rank fails the save on all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.reading.source import LoadSource
from torchtitan_lite.checkpoint.run_folders import RunFolders
from torchtitan_lite.checkpoint.saving.companion import Companion
from torchtitan_lite.checkpoint.saving.in_flight import InFlightSave
from torchtitan_lite.checkpoint.saving.savers import Saver, refused
from torchtitan_lite.checkpoint.saving.target import Origin
from torchtitan_lite.checkpoint.schedule.interval import BEGINNING, AtRisk, Tick
from torchtitan_lite.checkpoint.state.model_wrapper import EXPORT_DTYPES, weights_only
from torchtitan_lite.checkpoint.state.run_state import RunState
from torchtitan_lite.checkpoint.state.train_state import Metrics, finite
from torchtitan_lite.distributed.groups import naming_missing_ranks
from torchtitan_lite.errors import ConfigError, RanksDiffer, SaveFailed
from torchtitan_lite.events import SaveSkipped
from torchtitan_lite.log import logger
from torchtitan_lite.store.manifest import CheckpointKind, abandoned_by
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.stores import usable

T = TypeVar("T")


class SaveMaker:
    """Makes the states of `run` and saves them into `folders`; `in_flight` follows each save to its end.

    Of the two `savers` the second is for a save that the caller waits for.
    """

    def __init__(
        self,
        run: RunState,
        folders: RunFolders,
        in_flight: InFlightSave,
        savers: tuple[Saver, Saver],
        origin: Origin,
        context: RunContext,
        companions: Sequence[Companion],
    ) -> None:
        self._run = run
        self._companions = companions
        self._folders = folders
        self._in_flight = in_flight
        self._saver, self._at_once = savers
        self._config, self._peers, self._emit = context.config, context.peers, context.emit
        self.trained = TrainedClock(context.clock)
        self.is_prepared = self._is_compared = self._is_tried = False
        self._metrics: Metrics = {}
        self.origin = origin
        """Recorded in what is saved from now on; the parent step, though, is the last durable one."""
        self.last = self._begun = self._on_disk = BEGINNING
        """When the last save that counts for the policies began, or was skipped: after a load the one on disk."""

    @property
    def on_disk(self) -> Tick:
        """The moment of the latest state that is durable. Any rank."""
        return self._begun if self._in_flight.last_durable == self._begun.step else self._on_disk

    def now(self, step: int) -> Tick:
        """Return the moment of `step`, which has just been trained. Any rank."""
        return Tick(step, self.trained.seconds)

    @property
    def is_from_memory(self) -> bool:
        """Return whether this start resumed from an image in memory. Any rank."""
        return self.origin.memory_step >= 0

    def continue_from(self, source: LoadSource) -> None:
        """Record in what is saved from now on that the state is that of `source`, which was loaded. Any rank."""
        never_finite = None if source.model_only else source.recorded.never_finite
        self.origin = dataclasses.replace(
            self.origin, lineage=source.lineage, memory_step=source.memory_step, never_finite=never_finite
        )
        self.trained.continue_from(source.loaded.seconds)
        self.last = self._begun = self._on_disk = source.on_disk

    def note_metrics(self, metrics: Metrics) -> None:
        """Record `metrics` in what is saved from now on: the loop measured them at this step. Any rank."""
        self._metrics = metrics

    def begin(self, step: int) -> None:
        """Begin a full save in the background; nothing may be in flight."""
        self._begin(step, self._full_state, CheckpointKind.FULL, self._folders.checkpoints, self._saver)

    def note_not_saved(self, step: int) -> None:
        """Let the companions copy the state of `step`, which is not saved. Fails no save.

        Raises ConfigError for a state that no start could load, before the first copy, as a save does.
        """

        def make_origin() -> Origin:
            self._try_loads(step)  # All ranks are here, or none.
            return self._origin(step, {})

        copied = [each.not_saved(step, self._full_state, make_origin) for each in self._companions]
        if any(copied):
            self._look_back(step)

    def full(self, step: int) -> None:
        """Save in full, durable on return; nothing may be in flight. Raises `SaveFailed` if a second try fails, too.

        Raises `RanksDiffer` after the lowest ranks' state was saved.
        """
        self._and_wait(step, self._full_state, CheckpointKind.FULL, self._folders.checkpoints)

    def last_of_all(self, step: int) -> None:
        """Save the last step as `config` says, in full, only its weights or both; durable and raises as `full`."""
        config, exports = self._config, self._folders.exports
        if config.create_seed_checkpoint:
            self._and_wait(step, self._run.seed, CheckpointKind.FULL, self._folders.checkpoints)
            logger.info("Created seed checkpoint")
            return
        if not config.model_weights_only or exports is not None:
            logger.info("Saving a full checkpoint at last step, step %d.", step)
            self.full(step)
        if config.model_weights_only or exports is not None:
            self.export(step)

    def secure(self, step: int) -> None:
        """Save `step` in full if it was loaded from memory, which this start does not keep, and is not on disk.

        Durable; raises as `full`.
        """
        if self.origin.memory_step == step and not self.origin.start and not self.is_saved(step, loaded=step):
            self.full(step)

    def is_saved(self, step: int, *, loaded: int | None) -> bool:
        """Return whether the state of `step` is durable: saved last since the load of step `loaded`, or that one.

        A checkpoint of the same number may be another branch's. Nothing may be in flight.
        """

        def is_durable() -> bool:
            durable = self._in_flight.last_durable
            return durable == step if durable is not None else loaded == step and self._is_saved_in_full(step)

        return self._peers.on_coordinator(is_durable)

    def export(self, step: int) -> None:
        """Save only the weights, durable on return. Raises as `full` does."""
        if self._folders.exports is None and self._peers.on_coordinator(lambda: self._is_saved_in_full(step)):
            logger.warning(
                "Step %d keeps its full checkpoint and gets no export, which would replace it. "
                "Set --checkpoint.export_folder to have both",
                step,
            )
            return
        dtype = EXPORT_DTYPES[self._config.export_dtype]
        logger.info("Saving a model weights only checkpoint in %s at last step, step %d.", dtype, step)
        store = self._folders.exports or self._folders.checkpoints
        self._and_wait(
            step, lambda: weights_only(self._run.model.state_dict(), dtype), CheckpointKind.WEIGHTS_ONLY, store
        )

    def skip(self, step: int, in_flight: int) -> bool:
        """Skip the save of `step`, because that of step `in_flight` is still being written; return False."""
        logger.warning("Step %d is not saved: the save of step %d is still being written", step, in_flight)
        self._emit(SaveSkipped(step, in_flight=in_flight))
        self.last = self.now(step)
        return False

    def prepare(self, step: int, *, now: bool) -> None:
        """Prepare the saver before the first save is due: `now`, or if the optimizers of all ranks have state.

        Before its first step an optimizer has no state to plan for.
        """
        if self.is_prepared or self._config.load_only:
            return
        if now or self._peers.max_over_ranks(not self._run.optimizer.has_state()) == (0,):
            self.is_prepared = True
            self._saver.prepare(lambda: self._together(step, self._full_state))

    def compare_alongside(self, step: int) -> None:
        """Begin to compare what ranks share, alongside the training that follows `step`, once a start."""
        if not self._is_compared:
            self._is_compared = True
            self._saver.compare_alongside(lambda: self._together(step, self._full_state))

    def _full_state(self) -> State:
        return self._run.full(self._peers.rank)

    def _is_saved_in_full(self, step: int) -> bool:
        with usable(self._folders.checkpoints.address):
            committed = self._folders.checkpoints.committed()
        lineage = self.origin.lineage
        left = abandoned_by(lineage.run_id, lineage.last_kept, committed)
        return any(
            info.step == step and info.kind is CheckpointKind.FULL and (step, info.run_id) not in left
            for info in committed
        )

    def _and_wait(
        self, step: int, make_state: Callable[[], State], kind: CheckpointKind, store: StoresCheckpoints
    ) -> None:
        # No interval follows the last save, so it is tried again at once.
        for is_last_try in (False, True):
            self._begin(step, make_state, kind, store, self._at_once)
            if (failure := self._in_flight.outcome()) is None:
                if self._in_flight.differs is not None:
                    raise self._in_flight.differs
                return
            if is_last_try:
                raise failure

    def _begin(
        self, step: int, make_state: Callable[[], State], kind: CheckpointKind, store: StoresCheckpoints, saver: Saver
    ) -> None:
        state: State = {}
        metrics: dict[str, float] = {}
        failure: SaveFailed | None = None
        begun = self.now(step)
        try:
            if kind is CheckpointKind.FULL:
                self._try_loads(step)
            state, metrics = self._together(step, lambda: (make_state(), finite(self._metrics)))
        except SaveFailed as error:
            failure = error
        origin, writes_anyway = self._origin(step, metrics), saver is self._at_once
        target = self._in_flight.begin(step, kind, store, origin, writes_anyway=writes_anyway)
        try:
            # Not raised here, so that it is reported and counted like any other failed save.
            pending = saver.save(state, target) if failure is None else refused(failure, target)
        except RanksDiffer as error:
            self._in_flight.note_refused(step, error)
            raise
        self._in_flight.follow(target, pending)
        self._on_disk, self._begun, self.last = self.on_disk, begun, self.now(step)
        self._look_back(step)

    def _try_loads(self, step: int) -> None:
        """Once a start, raise ConfigError for a module that would not load what it saves, on every rank."""
        if not self._is_tried:
            # A load may be collective, so all ranks try if one has a reason to.
            if any(self._peers.max_over_ranks(self._together(step, self._run.has_other_keys))):
                self._together(step, self._run.try_loads)
            self._is_tried = True

    def _look_back(self, step: int) -> None:
        if self._peers.is_coordinator:
            self._run.after_save(step)

    def _origin(self, step: int, metrics: dict[str, float]) -> Origin:
        durable, lineage, now = self._in_flight.last_durable, self.origin.lineage, self.now(step)
        if durable is not None:
            lineage = dataclasses.replace(lineage, parent_step=durable)
        at_risk = AtRisk.between(self.on_disk, now)
        return dataclasses.replace(
            self.origin, lineage=lineage, metrics=metrics, trained_seconds=max(0.0, float(now.seconds)), at_risk=at_risk
        )

    def _together(self, step: int, make_here: Callable[[], T]) -> T:
        """Return what `make_here` does. If one rank cannot, that is a failed save, or wrong usage, on every rank."""

        def make() -> T:
            try:
                return make_here()
            except ConfigError:
                raise
            except Exception as error:
                raise SaveFailed(step, f"rank {self._peers.rank}: {type(error).__name__}: {error}") from error

        # Only here and at the first call of a manager: a timer at every step would cost more than that step's exchange.
        with naming_missing_ranks(f"save({step})"):
            return self._peers.together(make)


# The seconds that a run has trained, in all its starts up to the state that it has.
#
# An image and a checkpoint record them, so a start knows how much training the disk lacks. Time between starts, and
# what a start does before its loop, is no training; what a killed start trained after its last image is gone.


class TrainedClock:
    """Counts from its construction on, by `clock`. Each rank counts its own; all continue from the same seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # A total, not the seconds that the disk lacks: these change with each commit, which would have to renew the
        # card of every image.
        self._before, self._since = 0.0, clock()

    @property
    def seconds(self) -> float:
        """Return the seconds of training up to now."""
        return self._before + self._clock() - self._since

    def continue_from(self, seconds: float) -> None:
        """Count on from `seconds`, of a state that was loaded."""
        self._before, self._since = seconds, self._clock()

    def note_step(self) -> None:
        """Note that a step has ended: what was counted so far was training."""
        self.continue_from(self.seconds)

    def restart(self) -> None:
        """Leave out what has passed since the last step or load: the loop begins only now."""
        self._since = self._clock()
