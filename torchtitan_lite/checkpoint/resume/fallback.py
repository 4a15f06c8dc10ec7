"""The latest checkpoint that is what was committed.

A candidate that is proven damaged, before it is read or while it is, is passed over on all ranks,
and the next older one is taken, in the same start. Only once one was loaded are the damaged ones
quarantined: where all are damaged nothing is renamed, because a folder without checkpoints would be
a fresh start the next time. What was asked for by its step or path is never replaced by another,
and an error of the machine is no proof of damage. Every function is **collective**.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan_lite import faults
from torchtitan_lite.checkpoint.resume.load_source import LoadSource, choose_source
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.distributed.consensus import Peers
from torchtitan_lite.errors import (
    AllCheckpointsDamaged,
    CheckpointDamaged,
    CheckpointError,
    CheckpointUnreadable,
    CheckpointUnsafe,
)
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.housekeeping import OnEvent
from torchtitan_lite.store.known_manifests import damage_in
from torchtitan_lite.store.store import CheckpointStore

_MOST_KEYS = 100
"""In an event."""
_MOST_FINDINGS = 10
"""In a message: of files of another size there may be thousands."""


@dataclass
class Candidates:
    """The checkpoints of `store` that a load for `wanted` (-1: the latest) may take, latest first."""

    store: CheckpointStore
    wanted: int
    config: Checkpoint
    peers: Peers
    on_event: OnEvent
    is_exact: bool = False
    """Whether `wanted` itself is meant, not the latest of a branch that was begun there."""
    damaged: dict[int, CheckpointDamaged] = field(default_factory=dict)
    """What was found to be damaged so far, by step; the same on every rank."""
    _chosen: tuple[int, ...] | None = field(default=None, init=False, repr=False)
    """The identity of the manifest of the one that was chosen last; coordinator."""

    def take(self, load: Callable[[LoadSource], None]) -> LoadSource | None:
        """The first one that `load` does not find damaged, loaded; None if there is none to begin with.

        Raises `AllCheckpointsDamaged` if there were some, and `CheckpointDamaged` or `CheckpointUnsafe` for one that
        was asked for. One that is not there any more, removed by the job that writes the folder, is chosen again.
        """
        while (source := self._first_of(self._asked_for)) is not None:
            try:
                load(source)
            except (CheckpointDamaged, CheckpointUnsafe, CheckpointUnreadable) as error:
                if self._is_gone(source):
                    self._warn("Step %d was removed while it was read. Choosing again.", source.step)
                    continue
                if source.is_explicit or isinstance(error, CheckpointUnreadable):
                    self._tell_of_failure(source.step, error)
                    raise
                self.damaged[source.step] = damage = _as_damage(source, error)
                self._warn("step %d is damaged: %s. Trying an older one.", source.step, damage.summary)
            else:
                self._set_damaged_aside(source)
                return source
        return None

    def first(self) -> LoadSource | None:
        """The first one whose manifest and file sizes are right, of those not found damaged so far; changes nothing.

        None if there is none to begin with. Raises as `take` does.
        """
        return self._first_of(self._choose)

    def _first_of(
        self, choose: Callable[[], tuple[LoadSource | None, dict[int, CheckpointDamaged]]]
    ) -> LoadSource | None:
        source, self.damaged = self.peers.on_coordinator(choose)
        if source is None and self.damaged:
            raise AllCheckpointsDamaged(str(self.store.root), {step: e.summary for step, e in self.damaged.items()})
        return source

    def _asked_for(self) -> tuple[LoadSource | None, dict[int, CheckpointDamaged]]:
        """As `_choose`; that a step which was asked for cannot be loaded is an event."""
        try:
            return self._choose()
        except (CheckpointDamaged, CheckpointUnsafe, CheckpointUnreadable) as error:
            self._tell_of_failure(layout.parse_step(Path(error.path).name) or max(self.wanted, 0), error)
            raise

    def _choose(self) -> tuple[LoadSource | None, dict[int, CheckpointDamaged]]:
        """The next candidate whose manifest and file sizes are right, and what was found on the way to it."""
        damaged = dict(self.damaged)
        while True:
            source = choose_source(self.store, self.wanted, self.config, damaged, is_exact=self.is_exact)
            newer = {step: error for step, error in self.store.damaged().items() if self._is_newer(step, source)}
            damaged = newer | damaged
            self._refuse_what_may_be_newer(source)
            if source is None or source.initial or self.config.verify_on_load == "off":
                break
            if not (findings := self._size_findings(source)):
                break
            if _identity(source.path) is None:
                continue
            error = CheckpointDamaged(str(source.path), "; ".join(findings[:_MOST_FINDINGS]))
            if source.is_explicit:
                raise error
            damaged[source.step] = error
        if self.wanted == -1 and damaged and (source is None or source.initial):
            # Beginning anew over what is damaged would hide that it is.
            source = None
        self._chosen = None if source is None else _identity(source.path)
        return source, damaged

    def _refuse_what_may_be_newer(self, source: LoadSource | None) -> None:
        """Raise for a step beyond `source` that the system does not give: going on without it might lose it."""
        for step, error in sorted(self.store.unreadable().items(), reverse=True):
            if self._is_newer(step, source):
                raise error

    def _is_newer(self, step: int, source: LoadSource | None) -> bool:
        if source is None or source.initial:
            return self.wanted == -1
        # Beside a step that was asked for everything is left alone; a branch that goes on has its own latest.
        return step > source.step and (self.wanted == -1 or not source.is_explicit)

    def _size_findings(self, source: LoadSource) -> list[str]:
        info = next((info for info in self.store.committed() if info.path == source.path), None)
        return [] if info is None else self.store.check_sizes(info)

    def _is_gone(self, source: LoadSource) -> bool:
        """Whether `source`, one of several, was removed or replaced meanwhile; the same on every rank."""
        if source.is_explicit:
            return False
        return self.peers.on_coordinator(lambda: _identity(source.path) != self._chosen)

    def _tell_of_failure(self, step: int, error: CheckpointError) -> None:
        finding = error.cause if isinstance(error, CheckpointUnreadable) else getattr(error, "finding", "")
        self.on_event("load_failed", step, path=getattr(error, "path", ""), finding=finding)

    def _set_damaged_aside(self, source: LoadSource) -> None:
        if not self.damaged:
            return
        for step, error in sorted(self.damaged.items(), reverse=True):
            self._warn("Fell back from step %d to step %d: %s", step, source.step, error.summary)
            concerned = list(error.keys[:_MOST_KEYS])
            self.on_event("fallback", source.step, damaged_step=step, finding=error.finding, keys=concerned)
        if not self.config.load_only:
            for step, path in self.peers.on_coordinator(self._quarantine).items():
                self.on_event("quarantined", step, path=path)

    def _warn(self, message: str, *figures: object) -> None:
        """All ranks found the same; one tells of it."""
        if self.peers.is_coordinator:
            logger.warning(message, *figures)

    def _quarantine(self) -> dict[int, str]:
        moved = {}
        for step, error in sorted(self.damaged.items()):
            faults.point("quarantine", step=step)
            moved[step] = str(self.store.quarantine(step, [error.summary]))
        return moved


def _identity(folder: Path) -> tuple[int, ...] | None:
    """What another checkpoint in the place of `folder` would not have the same; None where there is none."""
    try:
        found = (folder / layout.MANIFEST).lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        # What a network filesystem says of a file that another host removed; else the error will be met again.
        return None if error.errno == errno.ESTALE else (error.errno or 0,)
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _as_damage(source: LoadSource, error: CheckpointDamaged | CheckpointUnsafe) -> CheckpointDamaged:
    return damage_in(source.path, error) if isinstance(error, CheckpointUnsafe) else error
