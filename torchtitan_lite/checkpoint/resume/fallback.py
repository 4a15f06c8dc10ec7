"""Finds the latest undamaged checkpoint, and falls back to an older one where the latest is damaged.

If a candidate proves damaged, before the load or during it, all ranks skip it and try the next older
one in the same start. The damaged ones are quarantined only after one was loaded: if all on disk are
damaged, nothing is renamed, because the next start would take a folder without checkpoints for a fresh start.
A step or path that the user named is never replaced by another one, and an error of the machine is no
proof of damage. Every public method is **collective**.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan_lite import faults
from torchtitan_lite.checkpoint.reading.files import Identity, differs, files_of
from torchtitan_lite.checkpoint.reading.source import LoadSource, Sources, Wanted
from torchtitan_lite.checkpoint.resume.load_source import choose_source
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import (
    AllCheckpointsDamaged,
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    CheckpointUnreadable,
    CheckpointUnsafe,
)
from torchtitan_lite.events import Emit, Fallback, LoadFailed, Quarantined
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.known_manifests import damage_in
from torchtitan_lite.store.manifest import CheckpointKind
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.store.rollbacks import joint_rollbacks, of_run
from torchtitan_lite.stores import usable

_MOST_KEYS = 100
"""Keys in an event."""
_MOST_FINDINGS = 10
"""Findings in a message: thousands of files may have another size."""
_DAMAGED = "Step %d is damaged: %s. Trying an older one"
"""Logged where the damage is found, once: the load of the next one may take minutes, or end the run."""


@dataclass
class Candidates:
    """The checkpoints of `store` that a load of what is `wanted` may use, latest first."""

    store: StoresCheckpoints
    wanted: Wanted
    peers: Peers
    emit: Emit
    choose: Callable[[StoresCheckpoints, Wanted, Collection[int]], LoadSource | None] = choose_source
    """Chooses the next candidate, none of the steps given last."""
    sources: Sources = field(default_factory=Sources)
    """What else there is to load; it goes before the disk."""
    taken: LoadSource | None = field(default=None, init=False)
    """The one that was loaded, undamaged."""
    damaged: dict[int, CheckpointDamaged] = field(default_factory=dict, init=False)
    """Damaged checkpoints found so far, by step; the same on every rank."""
    _chosen: Identity | None = field(default=None, init=False, repr=False)
    """The identity of the manifest of the last candidate; coordinator only."""
    _partly_loaded: CheckpointDamaged | None = field(default=None, init=False, repr=False)

    def __iter__(self) -> Iterator[LoadSource]:
        """Yield one candidate after the other, until one was `taken`, or there is none.

        Raises `AllCheckpointsDamaged` if each one is damaged; `CheckpointDamaged` or `CheckpointUnsafe` for a step or
        path that the user named; `CheckpointUnreadable` for an error of the machine, and `FolderUnusable` where that
        keeps the coordinator from seeing what is there.
        """
        self.taken = None
        while self.taken is None and (source := self._first_of(self._choose_and_report)) is not None:
            yield source
            if self.taken is None:
                gc.collect()  # No traceback holds any more what was allocated for it, as for its optimizer states.

    @contextmanager
    def trying(self, source: LoadSource) -> Iterator[None]:
        """Take `source` if the block, which loads it, ends without an error; if it is damaged, note that.

        If the job that writes the folder has removed it in the meantime, does neither. Raises `CheckpointDamaged` for
        a seed, which does not replace what was already loaded of a damaged one, and as the iteration does.
        """
        try:
            yield
        except (CheckpointDamaged, CheckpointUnsafe, CheckpointUnreadable) as error:
            if not self._is_chosen_again(source, error):
                self._note_damage(source, error)
        else:
            self._quarantine_damaged(source)
            if source.model_only and self._partly_loaded is not None:
                raise _only_in_a_new_process(self._partly_loaded, source)
            self.taken = source

    def _is_chosen_again(self, source: LoadSource, error: CheckpointError) -> bool:
        """Return whether `error`, of `source`, is none of a checkpoint that is still in the folder."""
        if self.sources.drop(source, error):
            return True
        if is_gone := self._is_gone(source):
            self._warn("Step %d was removed during the load: choosing again", source.step)
        return is_gone

    def _note_damage(
        self, source: LoadSource, error: CheckpointDamaged | CheckpointUnsafe | CheckpointUnreadable
    ) -> None:
        # A network that fails makes every checkpoint look damaged, so an error of the machine ends the run.
        if source.is_explicit or isinstance(error, CheckpointUnreadable):
            self._report_failure(source.step, error)
            raise error
        if isinstance(error, CheckpointUnsafe):
            damage = damage_in(source.path, error)
        else:  # Another object than `error`, whose traceback keeps what was read.
            damage = CheckpointDamaged(error.path, error.finding, error.keys)
        self.damaged[source.step] = damage
        if not source.model_only:
            self._partly_loaded = damage
        self._warn(_DAMAGED, source.step, damage.summary)

    def first(self) -> LoadSource | None:
        """Return the first candidate whose manifest and file sizes are right; None if there are no candidates.

        Changes nothing. Raises as the iteration does.
        """
        return self._first_of(self._choose)

    def _first_of(
        self, choose: Callable[[], tuple[LoadSource | None, dict[int, CheckpointDamaged]]]
    ) -> LoadSource | None:
        source, self.damaged = self.peers.on_coordinator(usable(self.store.address)(choose))
        if source is None and self.damaged:
            raise AllCheckpointsDamaged(str(self.store.address), {step: e.summary for step, e in self.damaged.items()})
        return source

    def _choose_and_report(self) -> tuple[LoadSource | None, dict[int, CheckpointDamaged]]:
        """Choose as `_choose` does; log each damaged one that is skipped.

        An event says so if the step or path that the user named cannot be loaded.
        """
        try:
            source, damaged = self._choose()
            if source is not None:  # Else the error names all of them.
                for step in sorted(damaged.keys() - self.damaged.keys(), reverse=True):
                    logger.warning(_DAMAGED, step, damaged[step].summary)
            return source, damaged
        except (CheckpointDamaged, CheckpointUnsafe, CheckpointUnreadable) as error:
            self._report_failure(layout.parse_step(Path(error.path).name) or max(self.wanted.step, 0), error)
            raise

    def _choose(self) -> tuple[LoadSource | None, dict[int, CheckpointDamaged]]:
        """Return the next candidate whose manifest and file sizes are right, and all damaged ones found so far."""
        damaged = dict(self.damaged)
        while True:
            source = self._chosen_of(damaged)
            newer = {step: error for step, error in self.store.damaged().items() if self._is_newer(step, source)}
            # What a load found wins over what the manifest shows, because it names the keys.
            damaged = newer | damaged
            self._refuse_what_may_be_newer(source)
            if source is None or source.initial or self.wanted.config.verify_on_load == "off":
                break
            if not (findings := self._size_findings(source)):
                break
            # The job that writes the folder has removed it meanwhile, as can happen to `load_model`: no damage.
            if files_of(source.path).identity() is None:
                continue
            error = CheckpointDamaged(str(source.path), "; ".join(findings[:_MOST_FINDINGS]))
            if source.is_explicit:
                raise error
            damaged[source.step] = error
        if self.wanted.step == -1 and damaged and (source is None or source.initial):
            # A fresh start over damaged checkpoints would hide the damage.
            source = None
        self._chosen = None if source is None else files_of(source.path).identity()
        preferred = self.sources.preferred(source, self.store, self.wanted)
        if preferred is not None and preferred is not source:
            found = joint_rollbacks(self.store.rollbacks.read(), preferred.rollbacks)
            preferred = dataclasses.replace(preferred, rollbacks=of_run(found, preferred.lineage))
        return preferred, damaged

    def _chosen_of(self, damaged: Collection[int]) -> LoadSource | None:
        try:
            return self.choose(self.store, self.wanted, damaged)
        except CheckpointNotFound:
            if (source := self.sources.elsewhere(self.store, self.wanted)) is None:
                raise
            return source

    def _refuse_what_may_be_newer(self, source: LoadSource | None) -> None:
        """Raise for an unreadable step after `source`: to resume without it might lose it."""
        for step, error in sorted(self.store.unreadable().items(), reverse=True):
            if self._is_newer(step, source):
                raise error

    def _is_newer(self, step: int, source: LoadSource | None) -> bool:
        if source is None or source.initial:
            return self.wanted.step == -1
        # A step that the user named leaves all others alone; a branch that continues has its own latest step.
        return step > source.step and (self.wanted.step == -1 or not source.is_explicit)

    def _size_findings(self, source: LoadSource) -> list[str]:
        info = next((info for info in self.store.committed() if info.path == source.path), None)
        return [] if info is None else self.store.check_sizes(info)

    def _is_gone(self, source: LoadSource) -> bool:
        """Return whether `source`, one of several candidates, was removed or replaced; the same on every rank."""
        if source.is_explicit:
            return False
        return self.peers.on_coordinator(lambda: differs(files_of(source.path).identity(), self._chosen))

    def _report_failure(self, step: int, error: CheckpointError) -> None:
        finding = error.cause if isinstance(error, CheckpointUnreadable) else getattr(error, "finding", "")
        self.emit(LoadFailed(step, path=getattr(error, "path", ""), finding=finding))

    def _quarantine_damaged(self, source: LoadSource) -> None:
        if not self.damaged:
            return
        for step, error in sorted(self.damaged.items(), reverse=True):
            self._warn("Fell back from step %d to step %d", step, source.step)
            keys = tuple(error.keys[:_MOST_KEYS])
            self.emit(Fallback(source.step, damaged_step=step, finding=error.finding, keys=keys))
        if not self.wanted.config.load_only:
            for step, path in self.peers.on_coordinator(usable(self.store.address)(self._quarantine)).items():
                self.emit(Quarantined(step, path=path))

    def _warn(self, message: str, *figures: object) -> None:
        """Log a warning on the coordinator only: all ranks found the same."""
        if self.peers.is_coordinator:
            logger.warning(message, *figures)

    def _quarantine(self) -> dict[int, str]:
        full = {info.step for info in self.store.committed() if info.kind is CheckpointKind.FULL}
        if not full - self.damaged.keys():
            # Loaded from memory: if that is lost before a save, the next start must not begin from scratch.
            return {}
        moved = {}
        for step, error in sorted(self.damaged.items()):
            faults.point("quarantine", step=step)
            moved[step] = str(self.store.quarantine(step, [error.summary]))
        return moved


def _only_in_a_new_process(damage: CheckpointDamaged, seed: LoadSource) -> CheckpointDamaged:
    """Return the error for the fallback to `seed` of a process that holds optimizer, step and data of `damage`."""
    finding = (
        f"{damage.finding}. Step {seed.step}, the next older one, has only a model, and this process has loaded a part "
        "of the rest from the damaged one: start the same command again to begin from it; with load_only, add "
        f"--checkpoint.load_step {seed.step}"
    )
    return CheckpointDamaged(damage.path, finding, damage.keys)
