"""Checkpoints that lose their name: replaced, abandoned, damaged, or removed by policy.

Every method may be cut anywhere, and `recover` finishes or removes what was left. Only names that `layout` spells are
ever removed; a damaged checkpoint is renamed, never removed. Whatever makes a checkpoint superfluous is durable before
the checkpoint loses its name.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.known_manifests import KnownManifests
from torchtitan_lite.store.layout import Listing, is_folder
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind
from torchtitan_lite.store.manifest_fields import json_bytes
from torchtitan_lite.store.place import on_disk

_MOST_LINES = 10
"""Of a branch that is set aside."""


class RetiredCheckpoints:
    """Checkpoints in `root` that lose the name of their step. **Coordinator only**; `CheckpointStore` calls it."""

    def __init__(self, root: Path, durable: Durable, manifests: KnownManifests) -> None:
        self.root = root
        self._durable = durable
        self._manifests = manifests

    def discard(self, info: CheckpointInfo) -> list[Path]:
        """Move the checkpoint of `info` to the trash, durably; return what is in the trash, for `remove`."""
        # The rename that makes it superfluous may not be durable yet.
        self._durable.fsync_dir(self.root)
        listing = Listing(self.root)
        if info.lineage.abandons or listing.replaced(info.step):
            # The list of what it abandons goes with it, and what it replaced may be on a list.
            self.rename_abandoned()
            listing = Listing(self.root)
        trash = []
        for path in listing.replaced(info.step):
            # Before the checkpoint itself, or readers would see an older one of the step.
            if path != info.path and not self._stays_next_to(path, info.step):
                trash.append(self._set_for_removal(path, info.step))
            elif path != info.path:
                self._set_weights_aside(path, info.step)
        return [*trash, self._set_for_removal(on_disk(info.path), info.step, None if trash else listing)]

    def quarantine(self, step: int, findings: Sequence[str], fence: Callable[[], object]) -> Path:
        """Rename the damaged checkpoint of `step` to `step-N.corrupt`, durably, and return its new path.

        Writes `findings` into the folder if the disk allows it; whoever found them has logged them. `fence`, which
        raises if the folder belongs to another job by now, is called first, and before each rename of the step.
        """
        fence()
        # The list of what it abandons goes with it.
        self.rename_abandoned()
        # The step's own name last: as long as it exists, no reader takes an older, replaced checkpoint for the step.
        for path in reversed(Listing(self.root).places()[step]):
            aside = Listing(self.root).take_aside(step, "corrupt")
            fence()
            self._durable.rename(path, aside)
        self._durable.fsync_dir(self.root)
        logger.warning("Step %d is damaged and is now %s", step, aside)
        try:
            text = json_bytes({"step": step, "findings": list(findings)}, indent=2)
            if os.path.lexists(aside / layout.FINDINGS):
                # It may be a link that leads out of the folder, or a pipe without a reader.
                self._durable.remove_file(aside / layout.FINDINGS)
            self._durable.write_file(aside / layout.FINDINGS, text)
            self._durable.fsync_dir(aside)
        except OSError as error:
            logger.warning("Could not write %s: %s", aside / layout.FINDINGS, error)
        return aside

    def recover(self) -> list[Path]:
        """Finish or remove everything that cut saves and removals left; return what was renamed or removed."""
        put_back = [*self._put_back(), *self.rename_abandoned()]
        listing = Listing(self.root)
        superseded = [(path, step) for step in listing.places() for path in self._superseded(step, listing)]
        leftovers = listing.leftovers()
        if self.root.is_dir():
            # A killed process may have made the folder and the names in it without syncing either, and these names make
            # the leftovers superfluous. What is seen after these syncs is durable.
            try:
                self._durable.fsync_dir(self.root.parent)
            except OSError as error:
                # A folder that this user may not open or write is not one in which a job of theirs made a name.
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
            self._durable.fsync_dir(self.root)
        let_go = [self._let_go(path, step) for path, step in superseded]
        removed = [path for path in leftovers if self._is_removed(path)]
        if removed:
            self._durable.fsync_dir(self.root)
        return [*put_back, *let_go, *(path for path in removed if not layout.is_probe(path.name))]

    def after_commit(self, step: int, replaced: Sequence[Path], abandons: Sequence[tuple[int, str]]) -> None:
        """Rename what the commit of `step` abandons, then remove what it `replaced`; log a warning if that fails."""
        try:
            self._set_aside(abandons)
            for path in replaced:
                if os.path.lexists(path):
                    self._let_go(path, step)
        except OSError as error:
            logger.warning("Step %d is saved, but what it replaced could not be removed: %s", step, error)

    def remove_superseded(self, step: int) -> None:
        """Remove what was replaced under `step`, if its present checkpoint is intact, which is durable."""
        for path in self._superseded(step, Listing(self.root)):
            self._let_go(path, step)

    def rename_abandoned(self) -> list[Path]:
        """Rename what any committed checkpoint abandons, durably; return the new paths."""
        abandons = [pair for info in self._manifests.intact() for pair in info.lineage.abandons]
        if abandons:
            # The commit that abandons them may not be durable yet.
            self._durable.fsync_dir(self.root)
        return self._set_aside(abandons)

    def move_aside(self, step: int) -> None:
        """Rename what has the name of the checkpoint of `step` and is no intact one of ours."""
        aside = Listing(self.root).take_aside(step, "foreign")
        logger.warning(
            "%s has no intact %s and is in the way of a save; it is now %s", self._final(step), layout.MANIFEST, aside
        )
        self._durable.rename(self._final(step), aside)

    def remove(self, path: Path) -> None:
        """Remove the file or folder `path`."""
        if is_folder(path):
            self._durable.remove_tree(path)
        else:
            self._durable.remove_file(path)

    def _set_aside(self, abandons: Sequence[tuple[int, str]]) -> list[Path]:
        """Rename the checkpoints in `abandons`, under whatever name they are; return the new paths."""
        if not abandons:
            return []
        left: dict[int, set[str]] = {}
        for step, run_id in abandons:
            left.setdefault(step, set()).add(run_id)
        listing = Listing(self.root)
        moved = []
        # A manifest may list any number of steps: look once at each of those that exist.
        for step, paths in listing.under_any_name(left.keys()).items():
            for path in paths:
                info = self._manifests.find_intact(step, [path])
                if info is not None and info.run_id in left[step]:
                    aside = listing.take_aside(step, f"abandoned-{info.run_id}")
                    self._durable.rename(path, aside)
                    moved.append((step, aside))
        if moved:
            self._durable.fsync_dir(self.root)
        for step, aside in moved[:_MOST_LINES]:
            logger.info("Step %d is of an abandoned branch and is now %s", step, aside.name)
        if more := moved[_MOST_LINES:]:
            logger.info("And so are %d more, up to step %d", len(more), more[-1][0])
        return [aside for _, aside in moved]

    def _put_back(self) -> list[Path]:
        """Rename every replaced checkpoint back whose successor is not in place; return the new paths."""
        put_back = []
        for step, places in Listing(self.root).places().items():
            if places[0] != self._final(step):
                self._durable.rename(places[0], self._final(step))
                put_back.append(self._final(step))
        return put_back

    def _superseded(self, step: int, listing: Listing) -> list[Path]:
        """Return the replaced checkpoints of `step`, if its present one is intact."""
        replaced = listing.replaced(step)
        return replaced if replaced and self._manifests.find_intact(step, [self._final(step)]) else []

    def _let_go(self, path: Path, step: int) -> Path:
        """Remove or rename `path`, which was replaced, durably; return its former or new path."""
        if self._stays_next_to(path, step):
            return self._set_weights_aside(path, step)
        # Absent for every reader first, durably: never half of it under its old name.
        self._is_removed(self._set_for_removal(path, step))
        return path

    def _stays_next_to(self, path: Path, step: int) -> bool:
        """Return whether `path` are exported weights that a full checkpoint of `step` replaced.

        They stay, under another name.
        """
        weights = self._manifests.find_intact(step, [path])
        full = self._manifests.find_intact(step, [self._final(step)])
        return (
            layout.parse_staging(path.name) is None
            and weights is not None
            and full is not None
            and weights.kind is CheckpointKind.WEIGHTS_ONLY
            and full.kind is CheckpointKind.FULL
        )

    def _set_weights_aside(self, path: Path, step: int) -> Path:
        """Rename the exported weights `path`, durably; return the new path."""
        aside = Listing(self.root).take_aside(step, "weights")
        self._durable.rename(path, aside)
        self._durable.fsync_dir(self.root)
        logger.info("The weights-only step %d is now %s: a full checkpoint takes its name", step, aside.name)
        return aside

    def _is_removed(self, path: Path) -> bool:
        """Return whether `path`, which no reader takes for a checkpoint, could be removed; log a warning if not.

        A network file system keeps a file that a process has open, under another name, and with it the folder.
        """
        try:
            self.remove(path)
        except OSError as error:
            logger.warning("Could not remove the leftover %s: %s; the next start tries again", path, error)
            return False
        return True

    def _set_for_removal(self, path: Path, step: int, listing: Listing | None = None) -> Path:
        """Make `path` absent for every reader, durably; return its path in the trash."""
        trash = (listing or Listing(self.root)).free_trash(step)
        self._durable.rename(path, trash)
        self._durable.fsync_dir(self.root)
        return trash

    def _final(self, step: int) -> Path:
        return self.root / layout.step_dir(step)
