"""The exit codes of every verb, and what an error becomes: a code and one sentence.

A script can rely on the codes; docs/cli.md has the same table.
"""

from __future__ import annotations

import os
from enum import IntEnum
from pathlib import Path

from torchtitan_lite.errors import (
    AllCheckpointsDamaged,
    CheckpointDamaged,
    CheckpointUnsafe,
    ConfigError,
    TorchtitanLiteError,
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
    if isinstance(error, TorchtitanLiteError):
        return error.fact or str(error)
    if isinstance(error, OSError) and error.strerror is not None and error.filename is not None:
        path = Path(os.fsdecode(error.filename)) if not isinstance(error.filename, int) else Path()
        if path.name.startswith(".") and path.suffix in _UNFINISHED:
            return f"{path.parent} cannot be written: {error.strerror}"
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__
