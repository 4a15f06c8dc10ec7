"""A run that rolls back by itself, because it diverged: bounded, and on record before anything changes.

It rolls back to the latest checkpoint before the step whose batch is skipped: one in which nothing was found wrong
when it was saved, whose digests are right, and which is finite once it is loaded. The record is durable before the
load; so a start after a kill rolls back, too, until the branch has a checkpoint of its own. Every method is
**collective**.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_lite import faults
from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.reading.source import LoadSource
from torchtitan_lite.checkpoint.resume.load_source import good_steps, new_run
from torchtitan_lite.checkpoint.resume.run_load import RunLoad
from torchtitan_lite.checkpoint.run_folders import RunFolders
from torchtitan_lite.checkpoint.state.run_state import RunState
from torchtitan_lite.errors import TrainingDiverged
from torchtitan_lite.events import Diverged
from torchtitan_lite.log import counted, logger
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.rollbacks import Rollback, joint_rollbacks, next_rollback, of_run, within
from torchtitan_lite.stores import usable


@dataclass(frozen=True)
class Limit:
    """At most `most` rollbacks from the last `num_steps` steps."""

    most: int
    num_steps: int

    def __str__(self) -> str:
        return f"{self.most} in {counted(self.num_steps, 'step')}"


class RollBack:
    """Takes `run` back to a checkpoint of `folders`, through `load`."""

    def __init__(self, folders: RunFolders, load: RunLoad, run: RunState, context: RunContext) -> None:
        self._store = folders.checkpoints
        self._fence = folders.checkpoints.check_lease
        self._load, self._run = load, run
        self._peers, self._emit = context.peers, context.emit

    def begin(self, step: int, reason: str, lineage: Lineage, limit: Limit) -> None:
        """Put on record that the run of `lineage` rolls back, because `step` is not to be kept.

        Raises `TrainingDiverged`, with what was tried, if it may not or cannot; nothing is changed then.
        """
        try:
            look = usable(self._store.address)(lambda: self._recorded(step, reason, lineage, limit))
            rollback = self._peers.on_coordinator(look)
        except TrainingDiverged:
            self._emit(Diverged(step, reason=reason))
            raise
        self._emit(Diverged(step, reason=reason, skipped_batch=rollback.skipped))

    def load(self) -> LoadSource:
        """Load what the record says; return it. Raises as `RunLoad.load` does, CheckpointError if there is nothing."""
        return self._finish(self._load.load_back())

    def after_load(self, source: LoadSource) -> LoadSource:
        """Return what a start that saves continues from: `source`, which it has loaded, if that is not on the way back.

        Rollbacks that only the upload folder had on record, the folder has from then on, too. Raises as `load`.
        """
        if source.rollbacks:
            self._peers.on_coordinator(lambda: self._take_over(source.rollbacks))
        return source if source.lineage.rolls_back_to is None else self._finish(source)

    def _finish(self, source: LoadSource) -> LoadSource:
        """Return `source`, which was just loaded on the way back; if it is not finite, an older one that is loaded."""
        while not self._is_finite(source):
            if self._peers.is_coordinator:
                logger.warning("Step %d has values that are not finite. Trying an older one", source.step)
            # An image of the branch may be later than what the run rolled back to.
            self._change(last=min(source.step - 1, _target(source)))
            source = self._load.load_back()
        faults.point("rolled_back", step=source.step)
        self._change(target=_target(source))
        return source

    def _is_finite(self, source: LoadSource) -> bool:
        is_finite = self._peers.together(lambda: self._run.is_finite(source.recorded.never_finite))
        return not self._peers.max_over_ranks(not is_finite)[0]

    def _take_over(self, others: Sequence[Rollback]) -> None:
        found = self._store.rollbacks.read()
        if (new := joint_rollbacks(found, others)) != found:
            with usable(self._store.address):
                self._fence()
                self._store.rollbacks.write(new)

    def _recorded(self, step: int, reason: str, lineage: Lineage, limit: Limit) -> Rollback:
        recorded = self._store.rollbacks.read()
        found = of_run(recorded, lineage)
        recent = within(step, limit.num_steps, found)
        rollback = next_rollback(step, reason, found, lineage, new_run().run_id)
        obstacle = ""
        if len(recent) >= limit.most:
            obstacle = f"at most {limit} are allowed"
        elif rollback is None:
            obstacle = "there is no earlier batch to skip"
        elif not (good_steps(self._store, rollback) or self._load.sources.good_steps(rollback)):
            obstacle = f"there is no checkpoint of step {rollback.last} or before in which nothing was found wrong"
        if obstacle or rollback is None:
            raise TrainingDiverged(step, reason, tuple(map(str, recent)), obstacle)
        text = (
            "Step %d: %s. Rolling back to the latest good checkpoint of step %d or before; batch %d of the data is "
            "skipped from then on (%d of at most %s)"
        )
        logger.warning(text, step, reason, rollback.last, rollback.skipped, len(recent) + 1, limit)
        self._fence()
        faults.point("roll_back", step=step)
        # Else the upload folder's record would bring those back that are left.
        self._store.rollbacks.write((*(each for each in recorded if each.is_left), *found, rollback))
        return rollback

    def _change(self, **fields: int) -> None:
        """Give the last rollback on record other values of these `fields`."""

        def change() -> None:
            with usable(self._store.address):
                *before, last = self._store.rollbacks.read()
                self._fence()
                self._store.rollbacks.write((*before, dataclasses.replace(last, **fields)))  # type: ignore[arg-type]

        self._peers.on_coordinator(change)


def _target(source: LoadSource) -> int:
    assert source.lineage.rolls_back_to is not None, "it is on the way back"
    return source.lineage.rolls_back_to
