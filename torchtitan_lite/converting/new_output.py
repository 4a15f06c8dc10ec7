"""The place where a result appears, complete or not at all.

Everything is written into a hidden folder next to OUT, synced, checked there, and renamed to OUT in one step. A failure
removes the folder, unless what is in it can be continued; what a killed process left is removed, or continued, by the
next command that writes the same OUT.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lite.disk.durable import DISK
from torchtitan_lite.disk.lock_file import locked
from torchtitan_lite.errors import CheckpointDamaged, ConfigError
from torchtitan_lite.log import logger


@dataclass(frozen=True)
class NewOutput:
    """What was written."""

    files: Sequence[str]
    num_tensors: int
    num_bytes: int
    """Of the tensors' elements; of a converted checkpoint, of all its files but our manifest."""
    notes: Sequence[str] = ()
    """Facts that the user should see; of a converted checkpoint, what the layout has no place for."""

    def to_json(self) -> dict[str, Any]:
        """Return what every verb that writes prints of it."""
        return {"files": [*self.files], "tensors": self.num_tensors, "bytes": self.num_bytes}


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder that becomes `out` if the block ends without an error; else nothing remains of it.

    Raises ConfigError if `out` exists and is no empty folder, or if another process writes it.
    """
    with _locked(out, may_be_empty_folder=True) as folder, _emptied(folder):
        yield folder
        _appear(folder, out)


@contextmanager
def continued_folder(out: Path) -> Iterator[Path]:
    """Yield a folder that becomes `out` if the block ends without an error; else it stays, to be continued.

    It has what earlier calls and killed processes left. Raises ConfigError as `new_folder`. Nothing stays if `out` has
    appeared meanwhile, or if what is copied is damaged or gone.
    """
    with _locked(out, may_be_empty_folder=True) as folder:
        try:
            yield folder
            _appear(folder, out)
        except BaseException as error:
            was_removed = isinstance(error.__cause__ or error, FileNotFoundError)
            if isinstance(error, CheckpointDamaged | ConfigError) or was_removed:
                DISK.remove_tree(folder)
            else:
                logger.warning("What was copied stays in %s: run the same command again to continue", folder)
            raise


@contextmanager
def new_file(out: Path) -> Iterator[Path]:
    """Yield the path of a file, to be written and synced, that becomes `out` if the block ends without an error.

    Raises ConfigError if `out` exists, or if another process writes it.
    """
    with _locked(out, may_be_empty_folder=False) as folder, _emptied(folder):
        file = folder / out.name
        yield file
        _refuse_existing(out, may_be_empty_folder=False)
        DISK.rename(file, out)
        DISK.fsync_dir(out.parent)


def _appear(folder: Path, out: Path) -> None:
    DISK.fsync_dir(folder)
    # Again, because it may have appeared while this was written.
    _refuse_existing(out, may_be_empty_folder=True)
    DISK.rename(folder, out)
    DISK.fsync_dir(out.parent)


@contextmanager
def _locked(out: Path, *, may_be_empty_folder: bool) -> Iterator[Path]:
    """Yield the hidden folder, which exists and is this process's."""
    _refuse_existing(out, may_be_empty_folder=may_be_empty_folder)
    folder = out.absolute().parent / f".{out.name}.unfinished"
    DISK.make_dir(folder.parent)
    folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        try:
            # Two commands with one OUT would write into the same hidden folder.
            stack.enter_context(locked(folder, wait_seconds=0))
        except BlockingIOError:
            raise ConfigError(f"{out} is being written by another process: wait for it, or name another OUT") from None
        yield folder


@contextmanager
def _emptied(folder: Path) -> Iterator[None]:
    """Remove what is in `folder`, and at the end the folder, if it is still there."""
    try:
        for left in folder.iterdir():  # By a process that was killed.
            DISK.remove_tree(left) if left.is_dir() else DISK.remove_file(left)
        yield
    finally:
        if folder.exists():
            DISK.remove_tree(folder)


def _refuse_existing(out: Path, *, may_be_empty_folder: bool) -> None:
    if not os.path.lexists(out):
        return
    if may_be_empty_folder and out.is_dir() and not out.is_symlink() and not any(out.iterdir()):
        return
    raise ConfigError(f"{out} exists: remove it, or name another OUT")
