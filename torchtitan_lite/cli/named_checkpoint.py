"""Which checkpoint a person means.

A step is spelt as the folder of a checkpoint, as `FOLDER:10`, or as `FOLDER` for the latest in a folder of checkpoints,
which may be an address. Where none of ours or DCP's is meant, it is one that another library wrote. A dump folder
stands for the `checkpoint` in it. Nothing is changed, and only manifests are read.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.bucket import naming
from torchtitan_lite.checkpoint.resume.wrong_folder import last_step
from torchtitan_lite.config.address import Address, is_address, parse_address
from torchtitan_lite.errors import AllCheckpointsDamaged, CheckpointNotFound, ConfigError
from torchtitan_lite.examining.opened import absence
from torchtitan_lite.examining.other_libraries import (
    description_of,
    is_lightning_file,
    is_lightning_folder,
    lightning_step_of,
    transformers_step_of,
)
from torchtitan_lite.log import listed
from torchtitan_lite.store import layout
from torchtitan_lite.store.layout import Listing, is_checkpoint
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind
from torchtitan_lite.store.place import Place, on_disk
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.store.store import CheckpointStore

IN_DUMP_FOLDER = "checkpoint"

_ONLY_READ = "which only ls, inspect, verify, diff, prune and export take"


@dataclass(frozen=True)
class Target:
    """A checkpoint, which may be damaged or not ours."""

    folder: Place
    root: str
    """The folder of checkpoints that it is in, as people write it; empty if it has not the name of a step."""
    step: int | None
    """Its step by its name; None if its name is not one of a step."""


def resolve(spelling: str) -> Target:
    """Return the checkpoint that `spelling` means, ours or DCP's.

    Raises ConfigError for a wrong address and for what another library wrote, CheckpointNotFound if there is none, and
    what `get` of a store raises.
    """
    target = resolve_any(spelling)
    folder = target.folder
    if folder.is_file():
        raise ConfigError(f"{folder} is a file of Lightning, {_ONLY_READ}; try import-weights for its weights")
    if folder.is_dir() and is_one(path := on_disk(folder)) and not is_checkpoint(path):
        raise ConfigError(f"{folder} is a folder of transformers, {_ONLY_READ}; name a folder of FSDP's in it")
    return target


def resolve_any(spelling: str) -> Target:
    """Return the checkpoint that `spelling` means, of another library too. Raises else as `resolve` does."""
    if is_address(spelling):
        return _target_in_store(SpeltAddress.of(spelling))
    path = Path(spelling)
    if is_lightning_file(path):
        return _of_path(path)
    if path.is_dir():
        return _of_path(path) if is_one(path) else _latest_of_any(folder_of_checkpoints(spelling))
    folder, colon, number = spelling.rpartition(":")
    if names_step(spelling):
        root = folder_of_checkpoints(folder)
        return _latest_of_any(root) if number == LATEST else _step_of_any(root, int(number))
    if os.path.lexists(path):
        raise CheckpointNotFound(str(path), None, finding="it is not a folder")
    finding = "it does not exist"
    if colon and Path(folder).is_dir():
        finding += f", and {number!r} is not a step: expected a number, or {LATEST!r}"
    raise CheckpointNotFound(str(path), None, finding=finding)


def names_step(spelling: str) -> bool:
    """Return whether `spelling`, which is no folder, is FOLDER:10 or FOLDER:latest, or a step's address."""
    if is_address(spelling):
        return SpeltAddress.of(spelling).is_step
    folder, _, number = spelling.rpartition(":")
    is_step = (number.isascii() and number.isdecimal()) or number == LATEST
    return bool(folder) and is_step and not os.path.lexists(spelling)


def refuse_step(spelling: str) -> None:
    """Raise ConfigError if `spelling` is that of one checkpoint, as `names_step` has it."""
    if names_step(spelling):
        folder = SpeltAddress.of(spelling).folder if is_address(spelling) else spelling.rpartition(":")[0]
        raise ConfigError(f"{spelling} is one checkpoint: name the folder of checkpoints, {folder}")


def folder_of_checkpoints(spelling: str) -> Path:
    """Return the folder of checkpoints on disk that `spelling` means: itself, or `checkpoint` in a dump folder.

    Raises CheckpointNotFound if there is no such folder.
    """
    path = Path(spelling)
    if not path.is_dir():
        finding = "it is not a folder" if os.path.lexists(path) else "it does not exist"
        raise CheckpointNotFound(str(path), None, finding=finding)
    below = path / IN_DUMP_FOLDER
    return below if not Listing(path).steps() and below.is_dir() else path


def local(spelling: str, verb: str) -> Path:
    """Return `spelling` as a path, for a `verb` that works only on disk. Raise ConfigError for an address."""
    if is_address(spelling):
        raise ConfigError(f"{spelling} is an address, and {verb} works only on folders on disk")
    return Path(spelling)


def _target_in_store(spelt: SpeltAddress) -> Target:
    from torchtitan_lite.bucket.bucket_store import open_bucket  # Its client is an extra, and takes its time.

    store = open_bucket(str(spelt.folder))
    if not spelt.name and spelt.step is None:
        return _latest(store.address, store, store.committed())
    head = store.head()
    kept = next((entry for entry in head.kept if spelt.step == entry.step or spelt.name == entry.name), None)
    if kept is not None:
        return Target(store.place_of(kept.name), store.address, kept.step)
    if spelt.step is not None:
        raise CheckpointNotFound(store.address, spelt.step, [entry.step for entry in head.kept])
    place = store.place_of(spelt.name)
    if finding := absence(place):
        raise CheckpointNotFound(str(place), None, finding=finding)
    return Target(place, "", None)


def _of_path(path: Path) -> Target:
    name = path.absolute().name
    if (step := layout.parse_step(name)) is not None:
        return Target(path, str(path.parent), step)
    return Target(path, "", _step_of_another_library(name))


def is_one(folder: Path) -> bool:
    """Return whether `folder` is a checkpoint, complete or not; not one that has checkpoints of ours in it."""
    if is_checkpoint(folder):
        return True
    is_of_transformers = description_of(folder) is not None or transformers_step_of(folder.absolute().name) is not None
    return is_of_transformers and not Listing(folder).steps()


def of_other_libraries(root: Path) -> list[Path]:
    """Return the checkpoints in `root`, complete or not, of transformers, accelerate and Lightning, by step."""
    found = []
    for name in Listing(root).names:
        path = root / name
        if (
            (transformers_step_of(name) is not None and path.is_dir())
            or is_lightning_file(path)
            or is_lightning_folder(path)
        ):
            found.append((_step_of_another_library(name) or 0, name))
    return [root / name for _, name in sorted(found)]


def _step_of_another_library(name: str) -> int | None:
    return lightning_step_of(name) if (step := transformers_step_of(name)) is None else step


def none_in(root: Path, finding: str) -> CheckpointNotFound:
    """Return the error for a folder on disk without checkpoints, which names the folders below that have some."""
    found = []
    for path in sorted(path for path in root.iterdir() if path.is_dir()):
        for below in (path, path / IN_DUMP_FOLDER):
            with suppress(OSError):  # What cannot be listed is left out.
                if below.is_dir() and not is_checkpoint(below) and last_step(below):
                    found.append(str(below))
    has = "has some" if len(found) == 1 else "have some"
    return CheckpointNotFound(str(root), None, finding=f"{finding}; {listed(found)} {has}" if found else finding)


def _step_of_any(root: Path, step: int) -> Target:
    folder = root / layout.step_dir(step)
    if folder.is_dir():
        return Target(folder, str(root), step)
    try:
        # The store knows absolute paths only.
        return Target(root / CheckpointStore(root).get(step).path.name, str(root), step)
    except CheckpointNotFound as error:
        steps = {path: _step_of_another_library(path.name) for path in of_other_libraries(root)}
        found = [path for path, of_path in steps.items() if of_path == step]
        if len(found) > 1:
            names = " and ".join(path.name for path in found)
            raise ConfigError(f"step {step} is in {root} as {names}: name one of them") from None
        if found:
            return _of_path(found[0])
        there = sorted({*error.available, *(each for each in steps.values() if each is not None)})
        raise CheckpointNotFound(str(root), step, there) from None


def _latest_of_any(root: Path) -> Target:
    store = CheckpointStore(root)
    try:
        # The store knows absolute paths only.
        infos = [dataclasses.replace(info, path=root / info.path.name) for info in store.committed()]
        return _latest(str(root), store, infos)
    except CheckpointNotFound as error:
        if others := [each for each in of_other_libraries(root) if each.is_file() or not absence(each)]:
            return _of_path(others[-1])
        raise none_in(root, error.finding) from None


def _latest(root: str, store: StoresCheckpoints, committed: Sequence[CheckpointInfo]) -> Target:
    """Return the latest full checkpoint, else the latest that is not ours, else the latest weights-only one.

    Where all are damaged, or the latest one that may be intact cannot be read, that is raised.
    """
    full = [info for info in committed if info.kind is CheckpointKind.FULL]
    if full:
        return Target(full[-1].path, root, full[-1].step)
    if unmanaged := [place for place in store.unmanaged() if (on_disk(place) / layout.METADATA).is_file()]:
        return Target(unmanaged[-1], root, layout.parse_step(unmanaged[-1].name))
    if committed:
        return Target(committed[-1].path, root, committed[-1].step)
    if unreadable := store.unreadable():
        raise unreadable[max(unreadable)]
    if damaged := store.damaged():
        raise AllCheckpointsDamaged(root, {step: error.summary for step, error in damaged.items()})
    raise CheckpointNotFound(root, None, finding="there is no complete checkpoint in it")


# What a person means by an address: a folder of checkpoints in an object store, or one of them.
#
# A step is spelt s3://bucket/run:10, s3://bucket/run/step-10, or with the name that its prefix has there. Nothing is
# sent.


LATEST = "latest"


@dataclass(frozen=True)
class SpeltAddress:
    """A folder, and which checkpoint in it; without a step or a name, the latest or all of them."""

    folder: Address
    step: int | None = None
    name: str = ""
    """Of the prefix of one save of a step."""
    is_latest: bool = False

    @property
    def is_step(self) -> bool:
        """Return whether it names one checkpoint, not its folder."""
        return self.step is not None or bool(self.name) or self.is_latest

    @classmethod
    def of(cls, spelling: str) -> SpeltAddress:
        """Return what `spelling` means. Raises ConfigError for what is no address of a folder."""
        folder, colon, number = spelling.rpartition(":")
        # Not in the part with the bucket, where a number would be a port, or a secret.
        if colon and "/" in folder.partition("://")[2]:
            if number == LATEST:
                return cls(parse_address(folder), is_latest=True)
            if number.isascii() and number.isdecimal():
                return cls(parse_address(folder), int(number))
        folder, _, name = spelling.removesuffix("/").rpartition("/")
        if (step := layout.parse_step(name)) is not None:
            return cls(parse_address(folder), step)
        if naming.parse_attempt(name) is not None:
            return cls(parse_address(folder), name=name)
        return cls(parse_address(spelling))
