"""The exit codes of every verb, and what an error becomes: a code and one sentence.

A script can rely on the codes; docs/cli.md has the same table.
"""

from __future__ import annotations

import os
from enum import IntEnum
from pathlib import Path

from torchtitan_lite.errors import (
    LAST_WITH_EARLIER_FORMATS,
    AllCheckpointsDamaged,
    CheckpointDamaged,
    CheckpointNotFound,
    CheckpointUnreadable,
    CheckpointUnsafe,
    ConfigError,
    FolderInUse,
    FolderUnusable,
    FormatTooNew,
    FormatTooOld,
    KeeperUnavailable,
    LeaseLost,
)


class ExitCode(IntEnum):
    """How a verb ended."""

    FINE = 0
    FAILED = 1
    USAGE = 2
    DAMAGE = 3
    DIFFERENT = 4


_UNFINISHED = (".tmp", ".unfinished")
"""Of hidden names that no person gave: what is written there gets its own name when it is complete."""
INTERRUPTED = 130
"""128 + SIGINT, as a shell has it."""


def code_of(error: BaseException) -> ExitCode:
    """Return the exit code of a verb that `error` ended."""
    if isinstance(error, ConfigError):
        return ExitCode.USAGE
    if isinstance(error, CheckpointDamaged | AllCheckpointsDamaged | CheckpointUnsafe):
        return ExitCode.DAMAGE
    return ExitCode.FAILED


def sentence_of(error: BaseException) -> str:
    """Return what a person needs to know of `error`, on one line, without the advice for a training job."""
    text = " ".join(_text_of(error).split())
    return text if text.endswith("..") else text.removesuffix(".")


def _text_of(error: BaseException) -> str:
    match error:
        case CheckpointNotFound() if error.step is not None:
            has = ", ".join(map(str, error.available)) or "no checkpoint"
            return f"step {error.step} is not in {error.folder} (it has {has})"
        case CheckpointDamaged():
            return f"{error.path} is damaged: {error.summary}"
        case AllCheckpointsDamaged():
            return f"every checkpoint in {error.folder} is damaged: " + "; ".join(
                f"step {step}: {finding}" for step, finding in sorted(error.findings.items())
            )
        case CheckpointUnsafe():
            return f"{error.path} is not read: {error.finding.strip().removesuffix('.')}; nothing in it was run"
        case CheckpointUnreadable():
            return f"{error.path} could not be read: {error.cause}"
        case FormatTooNew():
            return f"{error.path}: {error.in_short}: upgrade torchtitan_lite"
        case FormatTooOld():
            return f"{error.path}: {error.in_short}: commit {LAST_WITH_EARLIER_FORMATS} of torchtitan_lite reads it"
        case FolderUnusable():
            return f"{error.folder} cannot be used: {error.cause}"
        case FolderInUse():
            return f"{error.folder} is in use by {error.holder}: end that job, or wait for it"
        case KeeperUnavailable():
            return f"what is kept in memory is not known: {error.reason}"
        case LeaseLost():
            return f"{error.folder} was taken over by {error.holder} meanwhile, so nothing more was changed"
        case OSError() if error.strerror is not None and error.filename is not None:
            path = Path(os.fsdecode(error.filename)) if not isinstance(error.filename, int) else Path()
            if path.name.startswith(".") and path.suffix in _UNFINISHED:
                return f"{path.parent} cannot be written: {error.strerror}"
            return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__
