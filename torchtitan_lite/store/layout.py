"""Names on disk, and what a folder has under them.

The only module that knows how a folder of checkpoints spells its names. Each parser accepts exactly what its maker
produces, so `step-10.bak`, `my-step-3` and `step-007` are unknown names: never read, never removed.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

METADATA = ".metadata"
"""DCP's own description of the tensors."""

MANIFEST = "manifest.json"
"""Our manifest, written last; a folder without it was not committed by this package."""

LOCK = "writer.lock"
"""Names the job that writes the folder of checkpoints; in that folder, next to the checkpoints."""

PINS = "pins.json"
"""The steps that no rule removes; in the folder of checkpoints, next to them."""

ROLLBACKS = "rollbacks.json"
"""How often the run rolled back by itself; in the folder of checkpoints, next to them."""

FINDINGS = "findings.json"
"""What was wrong with a quarantined checkpoint; in its folder, next to its files."""

VERIFIED = "verified.json"
"""What `verify` found in which checkpoint; in the folder of checkpoints, next to them."""

DIGESTS = "torchtitan-lite.digests.json"
"""Sizes and digests of the files of a checkpoint that another library wrote; in its folder, or next to its file."""

UPLOADS = "uploads.json"
"""What of the folder of checkpoints has been uploaded, and how far; in it, next to them."""

FOLDER_ID = "folder.id"
"""The random id of the folder of checkpoints; in it, next to them."""

_NUMBER = "(0|[1-9][0-9]*)"
_STEP = re.compile(f"step-{_NUMBER}")
_STAGING = re.compile(rf"step-{_NUMBER}\.staging(?:-[0-9a-z]+)?")
_TRASH = re.compile(rf"\.trash-step-{_NUMBER}-{_NUMBER}")
_REPLACED = re.compile(rf"\.replaced-step-{_NUMBER}-{_NUMBER}")
_SET_ASIDE = re.compile(
    rf"step-{_NUMBER}\.(?:(corrupt|weights|foreign)(?:-{_NUMBER})?|(abandoned)-[0-9A-Za-z]+(?:-{_NUMBER})?)"
)
_PROBE = re.compile(r"\.probe-[0-9a-f]+")
_RECORD = "__{}_0.json"
_RANK_FILE = re.compile(rf"__{_NUMBER}_0\.(distcp|json)")
_DATA_FILE = re.compile(rf"__{_NUMBER}_{_NUMBER}\.distcp")


def probe_dir(token: str) -> str:
    """Return the name of the folder in which a file system is tried; `token` is lower-case hex."""
    return f".probe-{token}"


def is_probe(name: str) -> bool:
    """Return whether `name` is that of a folder in which a file system is tried."""
    return _PROBE.fullmatch(name) is not None


def step_dir(step: int) -> str:
    """Return the name of the committed checkpoint of `step`."""
    return f"step-{step}"


def parse_step(name: str) -> int | None:
    """Return the step of the committed checkpoint called `name`; None for other names."""
    return _one(_STEP, name)


def staging_dir(step: int, token: str) -> str:
    """Return the name of the staging folder of one save of `step`; `token`, in lower case, is of that save alone.

    The client of a network file system may lead a name to the folder that had it before. With one name for all attempts
    of a step, a retry could then write into the committed checkpoint.
    """
    return f"step-{step}.staging-{token}"


def parse_staging(name: str) -> int | None:
    """Return the step of the staging folder called `name`, with or without a token; None for other names."""
    return _one(_STAGING, name)


def trash_dir(step: int, number: int) -> str:
    """Return the name of a checkpoint of `step` that is being removed."""
    return f".trash-step-{step}-{number}"


def parse_trash(name: str) -> tuple[int, int] | None:
    """Return the (step, number) of the trash called `name`; None for other names."""
    return _two(_TRASH, name)


def replaced_dir(step: int, number: int) -> str:
    """Return the name of the checkpoint of `step` while another takes its place; the highest number is the latest."""
    return f".replaced-step-{step}-{number}"


def parse_replaced(name: str) -> tuple[int, int] | None:
    """Return the (step, number) of the replaced checkpoint called `name`; None for other names."""
    return _two(_REPLACED, name)


def aside_dir(step: int, why: str, number: int = 1) -> str:
    """Return the name of a checkpoint of `step` that was renamed; `number` from 1.

    `why` is "corrupt" for a damaged one, "abandoned-RUN" for one that the run RUN left by rolling back, "weights" for
    weights after a full checkpoint took their name, "foreign" for what was in the way and is not ours to remove.
    """
    return f"step-{step}.{why}" + ("" if number == 1 else f"-{number}")


def parse_set_aside(name: str) -> tuple[int, str] | None:
    """Return the step of the checkpoint called `name` that was renamed, and why: the word after the step.

    The word is "corrupt", "abandoned", "weights" or "foreign"; None for other names.
    """
    match = _SET_ASIDE.fullmatch(name)
    return (int(match[1]), match[2] or match[4]) if match else None


def data_file(rank: int, index: int) -> str:
    """Return the name of the `index`-th file that `rank` writes."""
    return f"__{rank}_{index}.distcp"


def record_file(rank: int) -> str:
    """Return the name of the record of `rank`."""
    return _RECORD.format(rank)


def parse_rank_file(name: str) -> tuple[int, bool] | None:
    """Return the rank whose first file, or whose record, is called `name`, and whether it is the record."""
    match = _RANK_FILE.fullmatch(name)
    return (int(match[1]), match[2] == "json") if match else None


def is_data_file(name: str) -> bool:
    """Return whether `name` is a file of tensors, of any rank."""
    return _DATA_FILE.fullmatch(name) is not None


def rank_of(name: str) -> int | None:
    """Return the rank that wrote the file of tensors called `name`; None for other names."""
    found = _two(_DATA_FILE, name)
    return None if found is None else found[0]


# Remembered, because a save looks at the names of all that is kept.
@lru_cache(maxsize=1 << 14)
def _one(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.fullmatch(name)
    return int(match[1]) if match else None


@lru_cache(maxsize=1 << 14)
def _two(pattern: re.Pattern[str], name: str) -> tuple[int, int] | None:
    match = pattern.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


# What is in a folder of checkpoints.
#
# A `Listing` is the names in the folder at one moment, sorted into ours and unknown ones. It opens no file; reading the
# manifests is for `known_manifests`.


class Listing:
    """The names in `root` at the moment of its creation; none if there is no such folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: list[str] = []
        with suppress(FileNotFoundError):
            self.names = sorted(os.listdir(root))  # noqa: PTH208  # a thousand paths take milliseconds
        self._taken = set(self.names)
        self.hidden = [name for name in self.names if name.startswith(".")]

    def places(self) -> dict[int, list[Path]]:
        """Return the paths of the checkpoints of each step, by ascending step.

        First the step's own name, if it exists, then what was replaced under it, latest first.
        """
        return {step: self.places_of(step) for step in self.committed_steps()}

    def places_of(self, step: int) -> list[Path]:
        """Return the paths of the checkpoints of `step`, as `places` does."""
        own = [self.root / name] if (name := step_dir(step)) in self._taken else []
        return own + self.replaced(step)

    def committed_steps(self, without: Collection[str] = ()) -> list[int]:
        """Return the steps of checkpoints, replaced ones among them, in ascending order; names in `without` apart."""
        names = (name for name in self.names if name not in without)
        own = {step for name in names if (step := parse_step(name)) is not None}
        return sorted(own.union(step for step, _ in self._numbered(parse_replaced)))

    def under_any_name(self, steps: Collection[int]) -> dict[int, list[Path]]:
        """Return the paths of each of `steps` that is there: of a checkpoint, staging folders, replaced ones."""
        found = {step: [self.root / step_dir(step)] for step in sorted(self.steps().intersection(steps))}
        for name in self.names:
            if (step := parse_staging(name)) in found:
                found[step].append(self.root / name)
        for step in {step for step, _ in self._numbered(parse_replaced)} & found.keys():
            found[step] += self.replaced(step)
        return found

    def steps(self) -> set[int]:
        """Return the steps that occur in any name: of a checkpoint, a replaced one, or a staging folder."""
        under_way = {step for name in self.names if (step := parse_staging(name)) is not None}
        return under_way.union(self.committed_steps())

    def replaced(self, step: int) -> list[Path]:
        """Return the replaced checkpoints of `step`, latest first."""
        numbers = (number for found, number in self._numbered(parse_replaced) if found == step)
        return [self.root / replaced_dir(step, number) for number in sorted(numbers, reverse=True)]

    def has_ours(self) -> bool:
        """Return whether anything here is certainly from a run of this package: an id, a manifest, a name set aside."""
        if FOLDER_ID in self.names or any(parse_set_aside(name) for name in self.names):
            return True
        places = (place for of_step in self.places().values() for place in of_step)
        return any(os.path.lexists(place / MANIFEST) for place in places)

    def leftovers(self) -> list[Path]:
        """Return staging folders, trash, and what trials of the file system left."""
        parsers = (parse_staging, parse_trash)
        is_left = [is_probe(name) or any(parse(name) is not None for parse in parsers) for name in self.names]
        return [self.root / name for name, its in zip(self.names, is_left, strict=True) if its]

    def take_aside(self, step: int, why: str) -> Path:
        """Return the first free path for a checkpoint of `step` that is renamed; it counts as taken from now on."""
        names = (aside_dir(step, why, number) for number in itertools.count(1))
        name = next(name for name in names if name not in self._taken)
        self._taken.add(name)
        return self.root / name

    def free_replaced(self, step: int) -> Path:
        """Return a free path for the next replaced checkpoint of `step`."""
        return self.root / replaced_dir(step, self._next(step, parse_replaced))

    def free_trash(self, step: int) -> Path:
        """Return a free path for the next checkpoint of `step` to remove."""
        return self.root / trash_dir(step, self._next(step, parse_trash))

    def _next(self, step: int, parse: Callable[[str], tuple[int, int] | None]) -> int:
        # Above all taken numbers, not in a gap between them: the highest number must be the latest.
        return 1 + max((number for found, number in self._numbered(parse) if found == step), default=0)

    def _numbered(self, parse: Callable[[str], tuple[int, int] | None]) -> list[tuple[int, int]]:
        return [found for name in self.hidden if (found := parse(name))]


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def is_checkpoint(folder: Path) -> bool:
    """Return whether `folder` has files of a checkpoint, complete or not."""
    with os.scandir(folder) as entries:
        return any(entry.name in (METADATA, MANIFEST) or is_data_file(entry.name) for entry in entries)


def is_unmanaged(folder: Path) -> bool:
    """Return whether `folder` has files of a checkpoint but no manifest."""
    return is_folder(folder) and not os.path.lexists(folder / MANIFEST) and is_checkpoint(folder)
