"""Scalars in TensorBoard's own files, written by whoever logs.

Each step is one write to an event file. torch's SummaryWriter writes in a thread: what the disk refuses there ends
the thread with a traceback, and is raised by a later call. Here it is one warning, until writing succeeds again; the
next step then begins a new file, because TensorBoard reads no further than to a torn record.
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
    """Event files in `folder`, one a start and one more after each failure. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd: int | None = None
        self._is_failing = False

    def start(self, first_step: int) -> None:
        """Begin a file; TensorBoard hides what earlier files have of `first_step` and later steps."""
        self._try(first_step, [])

    def log(self, step: int, tags: Mapping[str, float]) -> None:
        """Append `tags` of `step`, for whoever reads the file now."""
        summaries = [scalar(tag, value) for tag, value in tags.items()]  # type: ignore[no-untyped-call]  # torch's gap
        self._try(step, [Event(step=step, summary=summary) for summary in summaries])

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def _try(self, step: int, events: list[Event]) -> None:
        begun: Path | None = None
        try:
            if self._fd is None:
                begun = self._begin()
                events = [*_head(step), *events]
            assert self._fd is not None
            _write(self._fd, events)
        except OSError as error:
            self._give_up(error, begun)
        else:
            if self._is_failing:
                logger.warning("TensorBoard files in %s are written again, from step %d on", self._folder, step)
            self._is_failing = False

    def _begin(self) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names.
        seconds, number = f"{int(time.time()):010d}", f"{next(_numbers):06d}"
        path = self._folder / f"events.out.tfevents.{seconds}.{socket.gethostname()}.{os.getpid()}.{number}"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        return path

    def _give_up(self, error: OSError, begun: Path | None) -> None:
        with suppress(OSError):  # The same disk, and said below.
            self.close()
            if begun is not None:
                begun.unlink()
        if not self._is_failing:
            logger.warning("TensorBoard files in %s are not written: %s. Training goes on.", self._folder, error)
        self._is_failing = True


def _head(step: int) -> list[Event]:
    """What a file begins with: TensorBoard hides what earlier files have of `step` and later ones."""
    start = SessionLog(status=SessionLog.START)
    return [Event(file_version=_VERSION), Event(step=step, file_version=_VERSION), Event(step=step, session_log=start)]


def _write(fd: int, events: list[Event]) -> None:
    """Append `events` in one write."""
    buffer, now = io.BytesIO(), time.time()
    records = RecordWriter(buffer)
    for event in events:
        event.wall_time = now
        records.write(event.SerializeToString())
    data = buffer.getvalue()
    if (written := os.write(fd, data)) < len(data):
        raise OSError(f"only {written} of {len(data)} bytes fitted")
