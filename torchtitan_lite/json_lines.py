"""A file of JSON objects, one a line, that stays readable if its writer is killed.

Each line is one write, so a reader sees whole lines, and a killed process leaves at most one torn line at the end; the
next append starts a new line after it. A write that fails (disk full, folder read-only) is one warning until a write
succeeds again: a problem with a log must not end the run. If a run resumes from a step, the lines of later steps are
dropped, so that every step is in the history once.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_lite.disk.durable import DISK
from torchtitan_lite.log import counted, logger


class JsonLines:
    """Append lines to `path`. The first line creates the file and its folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._is_torn = False
        self._is_failing, self._num_lost = False, 0
        self._owed: list[bytes] = []

    def append(self, record: Mapping[str, Any], *, is_owed: bool = False) -> None:
        """Append `record` as the last line of the file; where it `is_owed`, also later. **Any thread**."""
        lines = [*self._owed, json.dumps(dict(record), default=str).encode() + b"\n"]
        try:
            if self._fd is None:
                self._open()
            while lines:
                self._write(lines[0])
                del lines[0]
        except OSError as error:
            if not self._is_failing:
                logger.warning("Could not write a line to %s: %s. Training continues", self.path, error)
            self._is_failing, self._num_lost = True, self._num_lost + (not is_owed)
        else:
            if self._is_failing:
                lost = counted(self._num_lost, "line") + (" is" if self._num_lost == 1 else " are")
                logger.warning("Writing to %s works again; %s lost", self.path, lost)
            self._is_failing, self._num_lost = False, 0
        self._owed = lines if is_owed else lines[:-1]

    def close(self) -> None:
        """Close the file. Idempotent; a later line opens it again."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with suppress(OSError):  # A network file system may report here what it could not write.
                os.close(fd)

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._fd).st_size
        self._is_torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def _write(self, line: bytes) -> None:
        assert self._fd is not None, "append opens the file first"
        whole = b"\n" + line if self._is_torn else line
        written = os.write(self._fd, whole)
        self._is_torn = written > 0 and not whole[:written].endswith(b"\n")
        if written < len(whole):
            raise OSError(f"wrote only {written} of {len(whole)} bytes")


def start_history(path: Path, loaded_step: int) -> None:
    """Drop the lines of `path` after `loaded_step`; at 0, a fresh start, move the file of an earlier run aside.

    Call it before any process appends: one that has the file open would continue in the old file. If the disk refuses,
    log a warning and leave the lines as they are.
    """
    try:
        if loaded_step:
            _drop_after(path, loaded_step)
        else:
            _move_aside(path)
    except OSError as error:
        logger.warning("%s still has the lines of an earlier run: %s. Training continues", path, error)


def object_in(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object in `text`; None if it is none, or damaged."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def whole_lines(data: bytes) -> list[tuple[bytes, dict[str, Any]]]:
    """Return the lines of `data` that are whole JSON objects, each with its newline, and the parsed object."""
    return [
        (line, record)
        for line in data.splitlines(keepends=True)
        if line.endswith(b"\n") and (record := object_in(line)) is not None
    ]


def _drop_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    kept = b"".join(line for line, record in whole_lines(data) if record.get("step", step + 1) <= step)
    if kept == data:
        return
    try:
        DISK.write_atomically(path, kept)
    except OSError:
        if not data.startswith(kept):
            raise
        os.truncate(path, len(kept))  # Needs no space on the disk. The lines to drop are mostly at the end.


def _move_aside(path: Path) -> None:
    if not path.exists() or not path.stat().st_size:
        return
    free = next(name for number in itertools.count(1) if not (name := path.with_name(f"{path.name}.{number}")).exists())
    DISK.rename(path, free)
    logger.info("Moved %s of an earlier run to %s", path, free.name)
