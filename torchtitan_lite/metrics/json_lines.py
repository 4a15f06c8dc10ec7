"""A file of JSON objects, one a line, that outlives being killed.

A line is one write, so that a reader sees whole lines; a process killed in the middle leaves at most
one torn line at the end. Whoever appends next starts on a new line. What the disk refuses (it is
full, the folder is read-only) is one warning until a write succeeds again: what is told about a run
must not end it. Where a run goes on from a step, the lines of later steps are dropped, so that every
step stands in the history once.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_lite.disk import durable
from torchtitan_lite.log import logger


class JsonLines:
    """Appends to `path`, which is made, with its folder, at the first line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._is_torn = False
        self._num_lost = 0

    def append(self, record: Mapping[str, Any]) -> None:
        """`record` is the last line of the file. Any thread."""
        line = json.dumps(dict(record), default=str).encode() + b"\n"
        try:
            if self._fd is None:
                self._open()
            self._write(line)
        except OSError as error:
            if not self._num_lost:
                logger.warning("a line for %s was not written: %s. Training goes on.", self.path, error)
            self._num_lost += 1
        else:
            if self._num_lost:
                logger.warning("%s is written again; %d lines of it are lost", self.path, self._num_lost)
            self._num_lost = 0

    def close(self) -> None:
        """The file is closed; idempotent, and a later line opens it again."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with suppress(OSError):  # What a network filesystem says here, it could not write.
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
            raise OSError(f"only {written} of {len(whole)} bytes fitted")


def start_history(path: Path, loaded_step: int) -> None:
    """The lines of `path` end at `loaded_step`; at 0, a fresh start, the file of an earlier run is moved aside.

    A process that has the file open would go on in the old one: call before any appends. What the disk refuses is a
    warning, and the older lines stay.
    """
    try:
        if loaded_step:
            _drop_after(path, loaded_step)
        else:
            _move_aside(path)
    except OSError as error:
        logger.warning("%s still has the lines of an earlier run: %s. Training goes on.", path, error)


def whole_lines(data: bytes) -> list[tuple[bytes, dict[str, Any]]]:
    """The lines of `data` that are whole JSON objects, each with its newline, beside what they say."""
    return [
        (line, record)
        for line in data.splitlines(keepends=True)
        if line.endswith(b"\n") and (record := _object(line)) is not None
    ]


def _drop_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    kept = b"".join(line for line, record in whole_lines(data) if record.get("step", step + 1) <= step)
    if kept == data:
        return
    try:
        durable.write_atomically(path, kept)
    except OSError:
        if not data.startswith(kept):
            raise
        os.truncate(path, len(kept))  # Needs no room: what goes is mostly the end.


def _move_aside(path: Path) -> None:
    if not path.exists() or not path.stat().st_size:
        return
    free = next(name for number in itertools.count(1) if not (name := path.with_name(f"{path.name}.{number}")).exists())
    durable.rename(path, free)
    logger.info("%s of an earlier run is now %s", path, free.name)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
