"""What is in a folder of checkpoints.

A `Listing` is the names in the folder at one moment, sorted into ours and unknown ones. It opens no file; reading the
manifests is for `known_manifests`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from torchtitan_lite.store import layout


class Listing:
    """The names in `root` at the moment of its creation; none if there is no such folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: list[str] = []
        with suppress(FileNotFoundError):
            self.names = sorted(os.listdir(root))  # noqa: PTH208  # a thousand paths take milliseconds
        self._taken = set(self.names)
        self._hidden = [name for name in self.names if name.startswith(".")]

    def places(self) -> dict[int, list[Path]]:
        """Return the paths of the checkpoints of each step, by ascending step.

        First the step's own name, if it exists, then what was replaced under it, latest first.
        """
        return {step: self.places_of(step) for step in self.committed_steps()}

    def places_of(self, step: int) -> list[Path]:
        """Return the paths of the checkpoints of `step`, as `places` does."""
        own = [self.root / name] if (name := layout.step_dir(step)) in self._taken else []
        return own + self.replaced(step)

    def committed_steps(self, without: Collection[str] = ()) -> list[int]:
        """Return the steps of checkpoints, replaced ones among them, in ascending order; names in `without` apart."""
        names = (name for name in self.names if name not in without)
        own = {step for name in names if (step := layout.parse_step(name)) is not None}
        return sorted(own.union(step for step, _ in self._numbered(layout.parse_replaced)))

    def has_replaced(self) -> bool:
        """Return whether there are replaced checkpoints."""
        return bool(self._numbered(layout.parse_replaced))

    def under_any_name(self, steps: Collection[int]) -> dict[int, list[Path]]:
        """Return the paths of each of `steps` that is there: of a checkpoint, staging folders, replaced ones."""
        found = {step: [self.root / layout.step_dir(step)] for step in sorted(self.steps().intersection(steps))}
        for name in self.names:
            if (step := layout.parse_staging(name)) in found:
                found[step].append(self.root / name)
        for step in {step for step, _ in self._numbered(layout.parse_replaced)} & found.keys():
            found[step] += self.replaced(step)
        return found

    def steps(self) -> set[int]:
        """Return the steps that occur in any name: of a checkpoint, a replaced one, or a staging folder."""
        under_way = {step for name in self.names if (step := layout.parse_staging(name)) is not None}
        return under_way.union(self.committed_steps())

    def replaced(self, step: int) -> list[Path]:
        """Return the replaced checkpoints of `step`, latest first."""
        numbers = (number for found, number in self._numbered(layout.parse_replaced) if found == step)
        return [self.root / layout.replaced_dir(step, number) for number in sorted(numbers, reverse=True)]

    def has_ours(self) -> bool:
        """Return whether anything here is certainly from a run of this package: an id, a manifest, a name set aside."""
        if layout.FOLDER_ID in self.names or any(layout.parse_set_aside(name) for name in self.names):
            return True
        places = (place for of_step in self.places().values() for place in of_step)
        return any(os.path.lexists(place / layout.MANIFEST) for place in places)

    def leftovers(self) -> list[Path]:
        """Return staging folders and trash."""
        parsers = (layout.parse_staging, layout.parse_trash)
        return [self.root / name for name in self.names if any(parse(name) is not None for parse in parsers)]

    def free(self, spell: Callable[[int], str]) -> Path:
        """Return the first free path of the names that `spell` makes of 1, 2, ..."""
        return self.root / next(name for number in itertools.count(1) if (name := spell(number)) not in self._taken)

    def take(self, spell: Callable[[int], str]) -> Path:
        """Return the same as `free`, and count it as taken from now on."""
        path = self.free(spell)
        self._taken.add(path.name)
        return path

    def free_replaced(self, step: int) -> Path:
        """Return a free path for the next replaced checkpoint of `step`."""
        return self.root / layout.replaced_dir(step, self._next(step, layout.parse_replaced))

    def free_trash(self, step: int) -> Path:
        """Return a free path for the next checkpoint of `step` to remove."""
        return self.root / layout.trash_dir(step, self._next(step, layout.parse_trash))

    def _next(self, step: int, parse: Callable[[str], tuple[int, int] | None]) -> int:
        # Above all taken numbers, not in a gap between them: the highest number must be the latest.
        return 1 + max((number for found, number in self._numbered(parse) if found == step), default=0)

    def _numbered(self, parse: Callable[[str], tuple[int, int] | None]) -> list[tuple[int, int]]:
        return [found for name in self._hidden if (found := parse(name))]


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def is_checkpoint(folder: Path) -> bool:
    """Return whether `folder` has files of a checkpoint, complete or not."""
    with os.scandir(folder) as entries:
        return any(
            entry.name in (layout.METADATA, layout.MANIFEST) or layout.is_data_file(entry.name) for entry in entries
        )


def is_unmanaged(folder: Path) -> bool:
    """Return whether `folder` has files of a checkpoint but no manifest."""
    if not is_folder(folder):
        return False
    if os.path.lexists(folder / layout.MANIFEST):
        return False
    with os.scandir(folder) as entries:
        return any(entry.name == layout.METADATA or layout.is_data_file(entry.name) for entry in entries)
