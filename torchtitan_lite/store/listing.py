"""What a folder of checkpoints holds.

A `Listing` is the names in the folder at one moment, sorted into ours and foreign ones. No file is
opened; what the manifests in the folders say is for `known_manifests` to look at.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

from torchtitan_lite.store import layout


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

    def steps(self) -> set[int]:
        """The steps that something is called after: a checkpoint, what was replaced, or a save under way."""
        under_way = {step for name in self.names if (step := layout.parse_staging(name)) is not None}
        return under_way | self.places().keys()

    def replaced(self, step: int) -> list[Path]:
        """What was replaced under the name of `step`, latest first."""
        numbers = (number for found, number in self._numbered(layout.parse_replaced) if found == step)
        return [self.root / layout.replaced_dir(step, number) for number in sorted(numbers, reverse=True)]

    def leftovers(self) -> list[Path]:
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


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def is_unmanaged(folder: Path) -> bool:
    """Whether `folder` holds a checkpoint's files and no manifest."""
    if not is_folder(folder):
        return False
    if os.path.lexists(folder / layout.MANIFEST):
        return False
    with os.scandir(folder) as entries:
        return any(entry.name == layout.METADATA or layout.is_data_file(entry.name) for entry in entries)
