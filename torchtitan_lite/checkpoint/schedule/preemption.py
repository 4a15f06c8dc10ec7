"""A scheduler's signal as a flag of this rank, and the deadline that starts with it.

A signal only sets the flag: a rank that began a save by itself would wait for peers that train on.
A thread that reads Python's wakeup pipe sets it, because a Python handler does not run while its
thread waits inside a collective. The same thread watches the deadline, because a rank whose peers are
gone never reaches the end of its step: at the deadline it ends the process. A second SIGTERM changes
nothing (a launcher sends one to all other workers as soon as the first one has left); a second SIGINT
ends the process in the kernel.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from torchtitan_lite.disk.threads import daemon
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import logger


class PreemptionWatch:
    """Records the first of `signals` that arrives, and ends the process `grace_seconds` after it with exit code 1."""

    def __init__(self, signals: Sequence[str], grace_seconds: float) -> None:
        self.numbers: Sequence[int] = [_signal_number(name) for name in signals]
        self._grace_seconds = grace_seconds
        self._received = 0
        self._deadline: float | None = None
        self._leaving = False

    @property
    def received(self) -> int:
        """The number of the first signal that arrived; 0 for none."""
        return self._received

    def seconds_left(self) -> float:
        """Return the seconds until this process is ended, at least 0; infinity before the first signal."""
        return math.inf if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def start(self) -> None:
        """Start to watch. Main thread; in another one Python gets no signals, so this logs a warning and does nothing.

        Leaves Ctrl-C to an interactive session, where it interrupts a cell: the deadline would end the session with all
        that is in it. Idempotent.
        """
        if HUB.has(self):
            return
        # A notebook's kernel, IPython, or Python at its prompt.
        if signal.SIGINT in self.numbers and (hasattr(sys, "ps1") or sys.flags.interactive):
            self.numbers = [number for number in self.numbers if number != signal.SIGINT]
            logger.info("Ctrl-C interrupts this interactive session as usual, without a save")
        if not self.numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "Signals can only be handled in the main thread: a preemption will not be saved. Make the manager there"
            )
            return
        HUB.add(self)

    def leave(self) -> None:
        """Have `close` ignore the signals from then on, because the ranks agreed to leave.

        As soon as the first rank has left, a launcher sends a signal to all others; it must not change how they end.
        """
        self._leaving = True

    def close(self) -> None:
        """End the watch and the deadline, and restore the previous handlers unless the ranks are leaving. Idempotent.

        If another watch of this process listens to the same signal, the last watch to close restores it.
        """
        if HUB.has(self):
            HUB.remove(self, ignore=self._leaving)
            self._deadline = None

    def hear(self, number: int) -> None:
        """Record the watched signal `number` and start the deadline. Called in the hub's thread."""
        if number == signal.SIGINT:
            # Not signal.signal: only the main thread may call it, which may be inside a collective.
            ctypes.CDLL(None).signal(number, 0)
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace_seconds
            self._received = number
            again = "; press Ctrl-C again to end at once" if number == signal.SIGINT else ""
            logger.info("Received %s: all ranks save and leave after this step%s", signal.Signals(number).name, again)

    def time_is_up(self) -> None:
        """End the process, with exit code 1."""
        logger.error(
            "%s came %.0f s ago and this rank could not leave: its peers are gone, or saving takes longer. "
            "Ending with exit code 1. If the scheduler waits longer, raise --checkpoint.preemption_grace_seconds",
            signal.Signals(self._received).name,
            self._grace_seconds,
        )
        os._exit(1)


def _signal_number(name: str) -> int:
    try:
        number = signal.Signals[name]
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise KeyError(name)
        return int(number)
    except KeyError:
        raise ConfigError(
            f"checkpoint.preemption_signals: {name!r} is not a signal that can be caught. Use names such as SIGTERM."
        ) from None


# The signals that this process watches, for any number of listeners.
#
# Python has one wakeup descriptor and one handler for each signal, so a process has one hub: the first listener sets it
# up, and when the last one is removed, in whichever order, the hub restores what was there before. Handlers that
# another library installs in between stay, and receive what they would receive without the hub. Forked children do not
# inherit it: a signal to a worker of a pool must end that worker, and must not preempt the job whose sockets it
# inherited.


_WAKE_UP = 0
"""Written to the pipe in place of a signal's number, to end the thread."""
_BY_HANDLER = 128
"""Added to a number that our handler wrote to the pipe: only what Python wrote goes to the previous descriptor."""


class SignalHub:
    """Passes signals on to listeners. `add` and `remove`: main thread only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[PreemptionWatch] = []
        self._before: dict[int, signal._HANDLER] = {}
        self._ignored: set[int] = set()
        self._after: dict[int, signal._HANDLER] = {}
        """What the last listener of a signal left as its handler."""
        self._wakeup_before = -1
        self._pipe: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None
        self._mask = threading.local()

    def has(self, listener: PreemptionWatch) -> bool:
        """Return whether `listener` receives signals in this process."""
        return any(each is listener for each in self._listeners)

    def add(self, listener: PreemptionWatch) -> None:
        """Pass the signals in `listener.numbers` on to it from now on."""
        if self._pipe is None:
            self._begin()
        with self._lock:
            self._listeners.append(listener)
        for number in listener.numbers:
            if number not in self._before:
                before = signal.signal(number, _forward_to_hub)
                # None stands for a handler that Python did not install and cannot restore.
                before = signal.SIG_DFL if before is None else before
                self._before[number] = self._left(number) if before is _forward_to_hub else before

    def remove(self, listener: PreemptionWatch, *, ignore: bool = False) -> None:
        """Pass no more signals to `listener`. A signal without a listener gets its previous handler back, or is ignored
        if `ignore` is true.
        """
        with self._lock:
            self._listeners = [each for each in self._listeners if each is not listener]
        if ignore:
            self._ignored |= set(listener.numbers)
        for number in set(self._before) - {number for each in self._listeners for number in each.numbers}:
            self._restore(number)
        if not self._listeners:
            self._end()

    def hold(self) -> None:
        """Block signals in this thread before it forks: the child must not receive one that is meant for its parent."""
        self._mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, self._before) if self._before else None

    def let_go(self) -> None:
        """Undo `hold`, in the process that forked."""
        if getattr(self._mask, "before", None) is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.before)

    def forget(self) -> None:
        """Reset the hub in a process that was just forked: signals get the handlers from before the first listener."""
        mask = getattr(self._mask, "before", None)
        self._ignored = set()
        for number in list(self._before):
            self._restore(number)
        if self._pipe is not None:
            self._restore_wakeup(self._pipe[1])
            for end in self._pipe:
                end.close()
        self.__dict__.update(SignalHub().__dict__)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def send(self, number: int) -> None:
        """Have the hub's thread handle `number`. Any thread, and signal handlers."""
        if self._pipe is not None:
            with suppress(OSError):  # The pipe is full: the thread is awake already.
                self._pipe[1].send(bytes([number]))

    def forward(self, number: int) -> None:
        """Handle `number`, whose handler ours was. Main thread.

        A library that restores handlers may put ours back after the last listener: then the one of after it acts.
        """
        if self._pipe is not None:
            self.send(number + _BY_HANDLER)
            return
        signal.signal(number, self._left(number))
        os.kill(os.getpid(), number)

    def _left(self, number: int) -> signal._HANDLER:
        return self._after.get(number, signal.SIG_DFL)

    def _begin(self) -> None:
        pipe = socket.socketpair()
        for end in pipe:
            end.setblocking(False)
        self._thread = daemon("preemption", self._watch, pipe[0])
        self._pipe = pipe
        self._ignored = set()
        # The interpreter's C handler writes the number here even while the main thread is inside a collective, where no
        # Python handler runs.
        self._wakeup_before = signal.set_wakeup_fd(pipe[1].fileno(), warn_on_full_buffer=False)

    def _end(self) -> None:
        assert self._pipe is not None and self._thread is not None
        self._restore_wakeup(self._pipe[1])
        self.send(_WAKE_UP)
        self._thread.join()
        for end in self._pipe:
            end.close()
        self._pipe = self._thread = None

    def _restore(self, number: int) -> None:
        before = self._before.pop(number)
        self._after[number] = signal.SIG_IGN if number in self._ignored else before
        if signal.getsignal(number) is _forward_to_hub:
            signal.signal(number, self._after[number])

    def _restore_wakeup(self, own: socket.socket) -> None:
        current = signal.set_wakeup_fd(-1)
        with suppress(ValueError, OSError):  # It was closed in the meantime.
            signal.set_wakeup_fd(self._wakeup_before if current == own.fileno() else current)

    def _watch(self, pipe: socket.socket) -> None:
        poll = select.poll()  # Not select(), which takes no descriptor above 1023: a trainer may have more files open.
        poll.register(pipe, select.POLLIN)
        while True:
            with self._lock:
                seconds = min((each.seconds_left() for each in self._listeners), default=math.inf)
            ready = poll.poll(None if seconds == math.inf else math.ceil(1000 * seconds))
            with self._lock:
                for each in self._listeners:
                    if not ready and each.seconds_left() <= 0:
                        each.time_is_up()
            numbers = pipe.recv(64) if ready else b""
            self._write_to_previous(bytes(number for number in numbers if _WAKE_UP < number < _BY_HANDLER))
            for number in numbers:
                with self._lock:
                    for each in self._listeners:
                        if number % _BY_HANDLER in each.numbers:
                            each.hear(number % _BY_HANDLER)
            if not self._listeners and _WAKE_UP in numbers:
                return

    def _write_to_previous(self, numbers: bytes) -> None:
        if numbers and self._wakeup_before != -1:
            with suppress(OSError):
                os.write(self._wakeup_before, numbers)


def _forward_to_hub(number: int, frame: FrameType | None) -> None:
    """Send `number` to the hub: without a handler Python writes to no wakeup pipe, and ours may have been replaced."""
    HUB.forward(number)


HUB = SignalHub()
"""The hub of this process."""

os.register_at_fork(before=HUB.hold, after_in_parent=HUB.let_go, after_in_child=HUB.forget)
