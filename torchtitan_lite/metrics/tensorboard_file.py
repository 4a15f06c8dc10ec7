"""Scalars in TensorBoard's event files, written in the thread that logs.

Each step is one write. torch's SummaryWriter writes in a thread of its own, which a disk error ends with a traceback,
and a later call raises. Here a disk error is one warning until a write succeeds again. The next step then starts a new
file, because TensorBoard stops reading a file at a torn record.
"""

from __future__ import annotations

import io
import itertools
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar

from torchtitan_lite.log import logger

_VERSION = "brain.Event:2"
_numbers = itertools.count()


class TensorBoardFile:
    """Event files in `folder`: one for each start, and another one after each failure. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd: int | None = None
        self._is_failing = False

    def start(self, first_step: int) -> None:
        """Start a file. TensorBoard then hides `first_step` and later steps of earlier files."""
        self._try(first_step, [])

    def log(self, step: int, tags: Mapping[str, float]) -> None:
        """Append `tags` of `step`. Other processes can read them when it returns."""
        summaries = [scalar(tag, value) for tag, value in tags.items()]  # type: ignore[no-untyped-call]  # torch's gap
        self._try(step, [Event(step=step, summary=summary) for summary in summaries])

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def _try(self, step: int, events: list[Event]) -> None:
        started: Path | None = None
        try:
            if self._fd is None:
                started = self._start_file()
                events = [*_head(step), *events]
            assert self._fd is not None
            _append_events(self._fd, events)
        except OSError as error:
            self._give_up(error, started)
        else:
            if self._is_failing:
                logger.warning("Writing TensorBoard files in %s works again, from step %d on", self._folder, step)
            self._is_failing = False

    def _start_file(self) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names.
        seconds, number = f"{int(time.time()):010d}", f"{next(_numbers):06d}"
        path = self._folder / f"events.out.tfevents.{seconds}.{socket.gethostname()}.{os.getpid()}.{number}"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        return path

    def _give_up(self, error: OSError, started: Path | None) -> None:
        with suppress(OSError):  # The same disk error again, which the warning below reports.
            self.close()
            if started is not None:
                started.unlink()
        if not self._is_failing:
            logger.warning("Could not write TensorBoard files in %s: %s. Training continues", self._folder, error)
        self._is_failing = True


def _head(step: int) -> list[Event]:
    """Return the first events of a file. They make TensorBoard hide `step` and later steps of earlier files."""
    start = SessionLog(status=SessionLog.START)
    return [Event(file_version=_VERSION), Event(step=step, file_version=_VERSION), Event(step=step, session_log=start)]


def _append_events(fd: int, events: list[Event]) -> None:
    """Append `events` in one write."""
    buffer, now = io.BytesIO(), time.time()
    records = RecordWriter(buffer)
    for event in events:
        event.wall_time = now
        records.write(event.SerializeToString())
    data = buffer.getvalue()
    if (written := os.write(fd, data)) < len(data):
        raise OSError(f"wrote only {written} of {len(data)} bytes")
