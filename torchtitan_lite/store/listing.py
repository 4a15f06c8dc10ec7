"""What a folder of checkpoints holds.

A `Listing` is the names in the folder at one moment, sorted into ours and foreign ones; `find` looks
into the folders that may hold a step. Reading changes nothing, so any rank and any tool may do it.
A checkpoint counts by its own manifest alone: its name must be its step's, and it must be a folder,
not a link to one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from torchtitan_lite.errors import CheckpointDamaged
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import NAN_IN, CheckpointInfo, Manifest


class Listing:
    """The names in `root` when it was made; none where there is no such folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            self.names = sorted(path.name for path in root.iterdir())
        except FileNotFoundError:
            self.names = []

    def places(self) -> dict[int, list[Path]]:
        """For each step, ascending: its own name, where there is one, then what was replaced under it, latest first."""
        places = {step: [self.root / name] for name in self.names if (step := layout.parse_step(name)) is not None}
        for step in {step for step, _ in self._numbered(layout.parse_replaced)}:
            places.setdefault(step, []).extend(self.replaced(step))
        return dict(sorted(places.items()))

    def replaced(self, step: int) -> list[Path]:
        """What was replaced under the name of `step`, latest first."""
        numbers = (number for found, number in self._numbered(layout.parse_replaced) if found == step)
        return [self.root / layout.replaced_dir(step, number) for number in sorted(numbers, reverse=True)]

    def leavings(self) -> list[Path]:
        """Saves under way and trash."""
        parsers = (layout.parse_staging, layout.parse_trash)
        return [self.root / name for name in self.names if any(parse(name) is not None for parse in parsers)]

    def free(self, spell: Callable[[int], str]) -> Path:
        """The first of the names that `spell` makes of 1, 2 ... which is free."""
        return self.root / next(name for number in itertools.count(1) if (name := spell(number)) not in self.names)

    def free_replaced(self, step: int) -> Path:
        """A free name for what is replaced next."""
        return self.root / layout.replaced_dir(step, self._next(step, layout.parse_replaced))

    def free_trash(self, step: int) -> Path:
        """A free name for what is removed next."""
        return self.root / layout.trash_dir(step, self._next(step, layout.parse_trash))

    def _next(self, step: int, parse: Callable[[str], tuple[int, int] | None]) -> int:
        # Above all that are taken, not the first gap: the highest number must be the latest.
        return 1 + max((number for found, number in self._numbered(parse) if found == step), default=0)

    def _numbered(self, parse: Callable[[str], tuple[int, int] | None]) -> list[tuple[int, int]]:
        return [found for name in self.names if (found := parse(name))]


def find(step: int, places: Sequence[Path]) -> CheckpointInfo | None:
    """The first intact checkpoint of `step` in `places`. Raises CheckpointDamaged where all there is, is damaged."""
    damage: CheckpointDamaged | None = None
    for folder in places:
        try:
            info = _inspect(folder, step)
        except CheckpointDamaged as error:
            damage = damage or error
        else:
            if info is not None:
                return info
    if damage is not None:
        raise damage
    return None


def find_intact(step: int, places: Sequence[Path]) -> CheckpointInfo | None:
    """As `find`, damage being as good as nothing."""
    try:
        return find(step, places)
    except CheckpointDamaged:
        return None


def describe(folder: Path, manifest: Manifest) -> CheckpointInfo:
    """What `manifest` says of the checkpoint in `folder`."""
    return CheckpointInfo(
        manifest.step,
        folder,
        manifest.kind,
        manifest.created_at,
        manifest.nbytes,
        manifest.lineage,
        has_nan=bool(manifest.extra.get(NAN_IN)),
    )


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def is_unmanaged(folder: Path) -> bool:
    """Whether `folder` holds a checkpoint's files and no manifest."""
    if not is_folder(folder):
        return False
    names = {path.name for path in folder.iterdir()}
    return layout.MANIFEST not in names and any(name == layout.METADATA or layout.is_data_file(name) for name in names)


def _inspect(folder: Path, step: int) -> CheckpointInfo | None:
    path = folder / layout.MANIFEST
    if not is_folder(folder):
        return None
    try:
        manifest = Manifest.parse(path.read_bytes(), str(path))
    except (FileNotFoundError, IsADirectoryError):
        return None
    if manifest.step != step:
        raise CheckpointDamaged(str(path), f"it is the manifest of step {manifest.step}")
    return describe(folder, manifest)
