"""Which checkpoint a person means.

A step is spelt as the folder of a checkpoint, as `FOLDER:10`, or as `FOLDER` for the latest in a folder of checkpoints.
A dump folder stands for the `checkpoint` in it. Nothing is changed, and only manifests are read.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.checkpoint.resume.initial_path import last_step
from torchtitan_lite.errors import AllCheckpointsDamaged, CheckpointNotFound, ConfigError
from torchtitan_lite.store import layout
from torchtitan_lite.store.listing import Listing, is_checkpoint
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind
from torchtitan_lite.store.store import CheckpointStore

LATEST = "latest"
IN_DUMP_FOLDER = "checkpoint"


@dataclass(frozen=True)
class Target:
    """A checkpoint on disk, which may be damaged or not ours."""

    folder: Path
    root: Path | None
    """The folder of checkpoints that it is in; None for a checkpoint that has not the name of a step."""
    step: int | None
    """Its step by its name; None if its name is not one of a step."""


def resolve(spelling: str) -> Target:
    """Return the checkpoint that `spelling` means.

    Raises ConfigError for a URL, CheckpointNotFound if there is none, and what `CheckpointStore.get` raises.
    """
    path = local(spelling)
    if path.is_dir():
        return _of_folder(path)
    folder, colon, number = spelling.rpartition(":")
    if names_step(spelling):
        root = folder_of_checkpoints(folder)
        return _latest(root) if number == LATEST else _of_step(root, int(number))
    if os.path.lexists(path):
        raise CheckpointNotFound(str(path), None, finding="it is not a folder")
    finding = "it does not exist"
    if colon and Path(folder).is_dir():
        finding += f", and {number!r} is not a step: expected a number, or {LATEST!r}"
    raise CheckpointNotFound(str(path), None, finding=finding)


def names_step(spelling: str) -> bool:
    """Return whether `spelling`, which is no folder, is FOLDER:10 or FOLDER:latest."""
    folder, _, number = spelling.rpartition(":")
    is_step = (number.isascii() and number.isdecimal()) or number == LATEST
    return bool(folder) and is_step and not os.path.lexists(spelling) and "://" not in spelling


def folder_of_checkpoints(spelling: str) -> Path:
    """Return the folder of checkpoints that `spelling` means: itself, or `checkpoint` in a dump folder.

    Raises ConfigError for a URL, and CheckpointNotFound if there is no such folder.
    """
    path = local(spelling)
    if not path.is_dir():
        finding = "it is not a folder" if os.path.lexists(path) else "it does not exist"
        raise CheckpointNotFound(str(path), None, finding=finding)
    below = path / IN_DUMP_FOLDER
    return below if not Listing(path).steps() and below.is_dir() else path


def local(spelling: str) -> Path:
    """Return `spelling` as a path. Raise ConfigError for a URL."""
    if "://" in spelling:
        raise ConfigError(f"{spelling} is a URL, and only folders of this machine can be read: copy it here first")
    return Path(spelling)


def _of_folder(path: Path) -> Target:
    if not is_checkpoint(path):
        return _latest(folder_of_checkpoints(str(path)))
    absolute = path.absolute()
    step = layout.parse_step(absolute.name)
    return Target(path, None if step is None else path.parent, step)


def none_in(root: Path, finding: str) -> CheckpointNotFound:
    """Return the error for a folder without checkpoints; it names the folders below that have some."""
    found = []
    for path in sorted(path for path in root.iterdir() if path.is_dir()):
        for below in (path, path / IN_DUMP_FOLDER):
            with suppress(OSError):  # What cannot be listed is left out.
                if below.is_dir() and not is_checkpoint(below) and last_step(below):
                    found.append(str(below))
    has = "has some" if len(found) == 1 else "have some"
    names = ", ".join(found[:3]) + f" and {len(found) - 3} more" * (len(found) > 3)
    return CheckpointNotFound(str(root), None, finding=f"{finding}; {names} {has}" if found else finding)


def _of_step(root: Path, step: int) -> Target:
    folder = root / layout.step_dir(step)
    if folder.is_dir():
        return Target(folder, root, step)
    try:
        return _of_info(CheckpointStore(root).get(step), root)
    except CheckpointNotFound as error:
        raise CheckpointNotFound(str(root), step, error.available) from None  # The store knows the absolute path only.


def _latest(root: Path) -> Target:
    """Return the latest full checkpoint, else the latest that is not ours, else the latest weights-only one.

    Where all are damaged, or the latest one that may be intact cannot be read, that is raised.
    """
    store = CheckpointStore(root)
    committed = store.committed()
    full = [info for info in committed if info.kind is CheckpointKind.FULL]
    if full:
        return _of_info(full[-1], root)
    if unmanaged := [folder for folder in store.unmanaged() if (folder / layout.METADATA).is_file()]:
        return Target(unmanaged[-1], root, layout.parse_step(unmanaged[-1].name))
    if committed:
        return _of_info(committed[-1], root)
    if unreadable := store.unreadable():
        raise unreadable[max(unreadable)]
    if damaged := store.damaged():
        raise AllCheckpointsDamaged(str(root), {step: error.summary for step, error in damaged.items()})
    raise none_in(root, "there is no complete checkpoint in it")


def _of_info(info: CheckpointInfo, root: Path) -> Target:
    return Target(root / info.path.name, root, info.step)
