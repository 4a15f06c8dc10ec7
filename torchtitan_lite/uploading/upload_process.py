"""A helper that uploads what a trainer commits, at low priority.

The trainer says when there is something new; the process says how it stands. Nothing waits for it but the end of a run.
A store that fails or hangs is tried again for as long as the process lives: no step and no save ever waits for one.
`UploadProcess` is the end of the trainer, `serve` the end of the process. A run has one, on the coordinator's host.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from torchtitan_lite import faults, log
from torchtitan_lite.disk.helper import Helper, Line
from torchtitan_lite.disk.threads import give_way
from torchtitan_lite.errors import (
    CheckpointError,
    ConfigError,
    ExtraMissing,
    FolderInUse,
    FolderUnusable,
    FormatTooNew,
    FormatTooOld,
    LeaseLost,
    PinsUnreadable,
    UnknownFormat,
    UploadRefused,
)
from torchtitan_lite.events import Emit, Event, UploadFailed, UploadsEnded
from torchtitan_lite.uploading.choice import Save
from torchtitan_lite.uploading.uploader import State, Uploader, UploadJob

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
_REPORT_SECONDS = 1.0
"""Between two words about bytes alone."""
_CHECK_SECONDS = 0.5
"""Between two checks of the time that is left, at the end of a run."""
_STOP_SECONDS = 5.0
_EVERY_ORDER = 1 << 62
_LASTING = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EINVAL)

_RESTART_SECONDS = 60.0
"""Between two starts of a process that dies, while the run trains."""
_MOST_DEATHS = 3
"""At the end of a run, of processes that did not complete one upload."""


class UploadProcess(Helper):
    """The trainer's end. `emit` and `state` are for any thread."""

    def __init__(self, job: UploadJob, emit: Emit, ignored_signals: Sequence[str] = ()) -> None:
        super().__init__("Upload", __name__, ignored_signals)
        self._job, self._emit = job, emit
        self._changed = threading.Condition()
        self._asked = self._answered = 0
        self._started_at = 0.0
        self._has_died = self._has_ended = False
        self.state = State()
        """What the process said last."""
        self.stored: set[Save] = set()
        """What the processes of this run have seen or put in the other folder."""

    def start(self) -> None:
        """Start the process unless it was started; do not wait for it. Main thread only. Raises OSError."""
        if self._process is not None:
            return
        self._start((self._job, faults.installed()))
        self._started_at = time.monotonic()
        self._listen()
        self.look()

    def look(self) -> None:
        """Have the process look for a new checkpoint, and start another one if it has died. Any thread."""
        with self._changed:
            self._asked += 1  # The next process owes it, too.
            if self._lines:
                with suppress(OSError):  # The listener sees the end.
                    self._send(self._asked)
                return
        is_due = time.monotonic() - self._started_at >= _RESTART_SECONDS
        # It dies with the thread that starts it.
        if self._has_died and is_due and threading.current_thread() is threading.main_thread():
            self._start_another()

    def _start_another(self) -> None:
        self.close()
        self._has_died = False
        self.state = State()
        try:
            self.start()
        except OSError:
            self._has_died, self._started_at = True, time.monotonic()  # As if it had died at once.

    @property
    def is_idle(self) -> bool:
        """Whether the process has uploaded all that there was when it was last asked to look."""
        return self._answered == self._asked

    def wait(self, seconds_left: Callable[[], float], patience_seconds: float) -> bool:
        """Wait until all is uploaded, while there are `seconds_left` and something new is sent; return whether it is.

        Something new is to be sent within `patience_seconds`. What is refused is tried once more, and a process that
        dies is replaced, up to three times without an upload between. Main thread.
        """
        if not self.is_idle:
            self.look()
        sent, moved_at, asked, deaths, stored = self.state.new_bytes, time.monotonic(), self._asked, 0, len(self.stored)
        while not self.is_idle:
            now, state = time.monotonic(), self.state
            if state.new_bytes != sent:
                sent, moved_at = state.new_bytes, now
            is_in_vain = (state.is_refused or state.is_lasting) and state.tried >= asked
            if is_in_vain or seconds_left() <= 0 or now - moved_at >= patience_seconds:
                break
            if not self._lines:
                if len(self.stored) > stored:
                    deaths, stored = 0, len(self.stored)
                if self._has_ended or deaths == _MOST_DEATHS:
                    break
                deaths += 1
                self._start_another()
            with self._changed:
                if not self.is_idle and self._lines:
                    self._changed.wait(_CHECK_SECONDS)
        if deaths == _MOST_DEATHS and not self._lines:
            self.state = State(problem="the process that uploads ended each time")
        return self.is_idle

    def close(self, seconds: float = _STOP_SECONDS) -> None:
        """End the process, at the latest after `seconds`; what is under way continues at the next start. Idempotent."""
        self.end(min(seconds, _STOP_SECONDS))

    def _heard(self, message: State | int | Event) -> None:
        with self._changed:
            if isinstance(message, State):
                self.state = message
                self.stored.update(() if message.stored is None else (message.stored,))
            elif isinstance(message, int):
                self._answered = message
            self._changed.notify_all()
        if isinstance(message, Event):
            self._has_ended |= isinstance(message, UploadsEnded)
            self._emit(message)

    def _ended(self, *, has_died: bool) -> None:
        with self._changed:
            if has_died and not self._has_ended:
                self._has_died = True
                log.logger.warning("The process that uploads checkpoints ended; starting another one")
            self._changed.notify_all()


class _Reporter:
    """Sends states to the trainer: at once, but for bytes alone."""

    def __init__(self, line: Line) -> None:
        self._line, self._last, self._at = line, State(), 0.0

    def __call__(self, state: State) -> None:
        now = time.monotonic()
        last = replace(self._last, sent_bytes=state.sent_bytes, new_bytes=state.new_bytes)
        is_more = replace(last, missing_bytes=state.missing_bytes) != state
        if is_more or now - self._at >= _REPORT_SECONDS:
            self._line.send(state)
            self._last, self._at = state, now


def serve(job: tuple[UploadJob, str], lines: Sequence[Line], fds: Sequence[int]) -> None:
    """Upload, in the process, until the trainer hangs up or dies; `job` also has its faults."""
    # Before the first thread, because threads inherit the priority.
    give_way()
    log.setup(0)
    (uploads, fault_spec), (line,) = job, lines
    faults.install(fault_spec, rank=0, process="uploader")
    orders = _Orders(line)
    try:
        _serve(Uploader(uploads, _Reporter(line), line.send), orders, line)
    except (ConfigError, ExtraMissing) as error:
        log.logger.error("Uploads have ended: %s", error)
        line.send(UploadsEnded(0, path=uploads.address, reason=str(error)))
        line.send(State(problem=str(error), is_refused=True, tried=_EVERY_ORDER))


class _Orders:
    """What the trainer asks for, received by a thread of its own: an upload takes hours."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._changed = threading.Condition()
        self.asked = 0
        self.is_over = False
        """Whether the trainer has closed the line."""
        self._is_waited_for = False
        threading.Thread(target=self._receive, daemon=True).start()

    def wait(self, done: int, seconds: float | None) -> int:
        """Return the number of the latest order once it is higher than `done`, or after `seconds`."""
        with self._changed:
            self._is_waited_for = True
            self._changed.wait_for(lambda: self.asked > done or self.is_over, seconds)
            self._is_waited_for = False
            return self.asked

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number = self._line.receive()
                with self._changed:
                    self.asked = number
                    self._changed.notify_all()
        with self._changed:
            self.is_over = True
            self._changed.notify_all()
            if not self._is_waited_for:
                # What is under way is cut here, as by a kill: the next start continues.
                os._exit(0)


def _serve(uploader: Uploader, orders: _Orders, line: Line) -> None:
    done, pause, is_open, said = 0, _FIRST_PAUSE_SECONDS, False, ""
    while True:
        asked = orders.wait(done, None)
        if orders.is_over:
            uploader.close()
            return
        try:
            if not is_open:
                uploader.open()
                is_open = True
                uploader.say(problem="", is_refused=False)
            while (info := uploader.next()) is not None:
                uploader.upload(info)
            done, pause, said = asked, _FIRST_PAUSE_SECONDS, ""
            line.send(done)
        except (UploadRefused, LeaseLost, UnknownFormat) as error:
            refused = UploadRefused(uploader.address, _upload_finding(error, uploader.address))
            log.logger.error("Uploads have ended: %s", refused)
            line.send(UploadsEnded(_uploading_step(uploader), path=uploader.address, reason=str(refused)))
            uploader.say(problem=refused.finding, is_refused=True, tried=_EVERY_ORDER)
            uploader.close()
            return
        except (OSError, CheckpointError) as error:
            # Each of these may end: a bucket, a key, a route, a disk.
            reason = _upload_finding(error, uploader.address)
            if reason != said:
                log.logger.warning("Could not upload to %s: %s. Trying again", uploader.address, reason)
                line.send(UploadFailed(_uploading_step(uploader), path=uploader.address, reason=reason))
            uploader.failures += 1
            # A tool holds a folder for a moment, another run until its end.
            is_held = isinstance(error, FolderInUse)
            uploader.say(problem=reason, is_refused=is_held, is_lasting=_is_lasting(error), tried=asked)
            said = reason
            orders.wait(asked, pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _upload_finding(error: Exception, address: str) -> str:
    """Return what is wrong, as a part of a sentence about the folder `address`: advice would name another key."""
    match error:
        case UploadRefused():
            return error.finding
        case FolderInUse():
            return f"it is in use by {error.holder}"
        case LeaseLost():
            return f"it was taken over by {error.holder or 'another job'}"
        case FolderUnusable():
            return f"{'' if error.folder == address else f'{error.folder}: '}{error.cause}".removesuffix(".")
        case FormatTooNew() | FormatTooOld():
            return f"{error.path} {error.in_short.removeprefix('it ')}"
    return str(error).removesuffix(".")


def _is_lasting(error: Exception) -> bool:
    """Return whether the next try would meet `error` again: a permission, a key, a file that a person has to change."""
    cause = error.__cause__ if isinstance(error, FolderUnusable) and error.__cause__ is not None else error
    if isinstance(cause, OSError) and cause.errno is not None:
        return cause.errno in _LASTING
    return isinstance(cause, FolderUnusable | PinsUnreadable)


def _uploading_step(uploader: Uploader) -> int:
    return uploader.state.uploading or 0
