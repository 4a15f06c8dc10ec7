"""The newest checkpoint that is what was committed.

A candidate that is proven damaged, before it is read or while it is, is passed over on all ranks,
and the next older one is taken, in the same start. Only once one was loaded are the damaged ones
quarantined: where all are damaged nothing is renamed, because a folder without checkpoints would be
a fresh start the next time. What was asked for by its step or path is never replaced by another,
and an error of the machine is no proof of damage. Every function is **collective**.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torchtitan_lite import faults
from torchtitan_lite.checkpoint.load_source import LoadSource, choose_source
from torchtitan_lite.checkpoint.upkeep import OnEvent
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.distributed.consensus import Peers
from torchtitan_lite.errors import AllCheckpointsDamaged, CheckpointDamaged
from torchtitan_lite.log import logger
from torchtitan_lite.store.store import CheckpointStore

_MOST_KEYS = 100
"""In an event."""


@dataclass
class Candidates:
    """The checkpoints of `store` that a load for `wanted` (-1: the newest) may take, newest first."""

    store: CheckpointStore
    wanted: int
    config: Checkpoint
    peers: Peers
    on_event: OnEvent
    is_exact: bool = False
    """Whether `wanted` itself is meant, not the newest of a branch that was begun there."""
    damaged: dict[int, CheckpointDamaged] = field(default_factory=dict)
    """What was found to be damaged so far, by step; the same on every rank."""

    def take(self, load: Callable[[LoadSource], None]) -> LoadSource | None:
        """The first one that `load` does not find damaged, loaded; None if there is none to begin with.

        Raises `AllCheckpointsDamaged` if there were some, and `CheckpointDamaged` for one that was asked for.
        """
        while (source := self.first()) is not None:
            try:
                load(source)
            except CheckpointDamaged as error:
                if source.is_explicit:
                    raise
                self.damaged[source.step] = error
                self._warn("step %d is damaged: %s. Trying an older one.", source.step, error.told)
            else:
                self._set_damaged_aside(source)
                return source
        return None

    def first(self) -> LoadSource | None:
        """The first one whose manifest and file sizes are right, of those not found damaged so far; changes nothing.

        None if there is none to begin with. Raises as `take` does.
        """
        source, self.damaged = self.peers.decide(self._choose)
        if source is None and self.damaged:
            raise AllCheckpointsDamaged(str(self.store.root), {step: e.told for step, e in self.damaged.items()})
        return source

    def _choose(self) -> tuple[LoadSource | None, dict[int, CheckpointDamaged]]:
        """The next candidate whose manifest and file sizes are right, and what was found on the way to it."""
        damaged = dict(self.damaged)
        while True:
            source = choose_source(self.store, self.wanted, self.config, damaged, is_exact=self.is_exact)
            newer = {step: error for step, error in self.store.damaged().items() if self._is_newer(step, source)}
            damaged = newer | damaged
            if source is None or source.initial or self.config.verify_on_load == "off":
                break
            if not (findings := self._size_findings(source)):
                break
            error = CheckpointDamaged(str(source.path), "; ".join(findings))
            if source.is_explicit:
                raise error
            damaged[source.step] = error
        if self.wanted == -1 and damaged and (source is None or source.initial):
            # Beginning anew over what is damaged would hide that it is.
            source = None
        return source, damaged

    def _is_newer(self, step: int, source: LoadSource | None) -> bool:
        return self.wanted == -1 and (source is None or source.initial or step > source.step)

    def _size_findings(self, source: LoadSource) -> list[str]:
        info = next((info for info in self.store.committed() if info.path == source.path), None)
        return [] if info is None else self.store.check_sizes(info)

    def _set_damaged_aside(self, source: LoadSource) -> None:
        if not self.damaged:
            return
        for step, error in sorted(self.damaged.items(), reverse=True):
            self._warn("Fell back from step %d to step %d: %s", step, source.step, error.told)
            concerned = list(error.keys[:_MOST_KEYS])
            self.on_event("fallback", source.step, damaged_step=step, finding=error.finding, keys=concerned)
        if not self.config.load_only:
            for step, path in self.peers.decide(self._quarantine).items():
                self.on_event("quarantined", step, path=path)

    def _warn(self, message: str, *figures: object) -> None:
        """All ranks found the same; one tells of it."""
        if self.peers.is_coordinator:
            logger.warning(message, *figures)

    def _quarantine(self) -> dict[int, str]:
        moved = {}
        for step, error in sorted(self.damaged.items()):
            faults.point("quarantine", step=step)
            moved[step] = str(self.store.quarantine(step, [error.told]))
        return moved
