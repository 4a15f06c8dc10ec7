"""A scheduler's signal as a fact of this rank, and the deadline that follows from it.

A signal only sets a flag: a rank that began a save by itself would wait for peers that train on.
The flag is set by a thread that reads Python's wakeup pipe, because a Python handler does not run
while its thread waits inside a collective, and the same thread keeps the deadline: a rank whose
peers are gone never reaches the end of its step, and is ended. A second SIGTERM changes nothing (a
launcher sends one to all others as soon as the first worker has left); a second SIGINT ends the
process in the kernel.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import threading
import time
from collections.abc import Sequence

from torchtitan_lite.checkpoint.schedule.signals import HUB
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import logger


class PreemptionWatch:
    """Remembers the first of `signals` that arrives; ends the process `grace_seconds` after it, with exit code 1."""

    def __init__(self, signals: Sequence[str], grace_seconds: float) -> None:
        self.numbers: Sequence[int] = [_number(name) for name in signals]
        self._grace_seconds = grace_seconds
        self._received = 0
        self._deadline: float | None = None
        self._leaving = False

    @property
    def received(self) -> int:
        """The number of the first signal that arrived; 0 for none."""
        return self._received

    def seconds_left(self) -> float:
        """Seconds until this process is ended, at least 0; infinity while no signal has come to this rank."""
        return math.inf if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def start(self) -> None:
        """Watches from now on. Main thread (elsewhere Python has no signals: a warning, and no watch). Idempotent."""
        if HUB.has(self) or not self.numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            logger.warning("Signals can only be watched from the main thread: a preemption will not be saved.")
            return
        HUB.add(self)

    def leave(self) -> None:
        """The ranks agreed to leave: from `close` on the signals are ignored, for as soon as the first rank has left,
        a launcher sends one to all others, and it must not change how they end."""
        self._leaving = True

    def close(self) -> None:
        """Ends the watch and the deadline; restores what was before, unless the ranks are leaving. Idempotent.

        Of a signal that another watch of this process hears too, the last one restores it.
        """
        if HUB.has(self):
            HUB.remove(self, ignore=self._leaving)
            self._deadline = None

    def hear(self, number: int) -> None:
        """A signal arrived, one of those that are watched. Called in a thread."""
        if number == signal.SIGINT:
            # Not signal.signal: that is the main thread's, which may be inside a collective.
            ctypes.CDLL(None).signal(number, 0)
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace_seconds
            self._note(number)

    def _note(self, number: int) -> None:
        self._received = number
        again = " Press Ctrl-C again to end at once." if number == signal.SIGINT else ""
        logger.info("Received %s: all ranks save and leave after this step.%s", signal.Signals(number).name, again)

    def time_is_up(self) -> None:
        """The process ends."""
        logger.error(
            "%s came %.0f s ago and this rank could not leave: its peers are gone, or saving takes longer. Ending. "
            "If the scheduler waits longer, raise --checkpoint.preemption_grace_seconds.",
            signal.Signals(self._received).name,
            self._grace_seconds,
        )
        os._exit(1)


def _number(name: str) -> int:
    try:
        number = signal.Signals[name]
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise KeyError(name)
        return int(number)
    except KeyError:
        raise ConfigError(
            f"checkpoint.preemption_signals: {name!r} is not a signal that can be caught. Use names such as SIGTERM."
        ) from None
