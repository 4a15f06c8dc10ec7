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
import signal
import sys
import threading
import time
from collections.abc import Sequence

from torchtitan_lite.checkpoint.schedule.signals import HUB
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import logger


class PreemptionWatch:
    """Records the first of `signals` that arrives, and ends the process `grace_seconds` after it with exit code 1."""

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
        """Return the seconds until this process is ended, at least 0; infinity before the first signal."""
        return math.inf if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def start(self) -> None:
        """Start to watch. Main thread; in another one Python gets no signals, so this logs a warning and does nothing.

        Leaves Ctrl-C to an interactive session, where it interrupts a cell: the deadline would end the session with all
        that is in it. Idempotent.
        """
        if HUB.has(self):
            return
        if signal.SIGINT in self.numbers and _is_interactive():
            self.numbers = [number for number in self.numbers if number != signal.SIGINT]
            logger.info("Ctrl-C interrupts this interactive session as usual, without a save")
        if not self.numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            logger.warning("Signals can only be watched from the main thread: a preemption will not be saved")
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
            self._note(number)

    def time_is_up(self) -> None:
        """End the process, with exit code 1."""
        logger.error(
            "%s came %.0f s ago and this rank could not leave: its peers are gone, or saving takes longer. "
            "Ending with exit code 1. If the scheduler waits longer, raise --checkpoint.preemption_grace_seconds",
            signal.Signals(self._received).name,
            self._grace_seconds,
        )
        os._exit(1)

    def _note(self, number: int) -> None:
        self._received = number
        again = "; press Ctrl-C again to end at once" if number == signal.SIGINT else ""
        logger.info("Received %s: all ranks save and leave after this step%s", signal.Signals(number).name, again)


def _is_interactive() -> bool:
    """Return whether this process is a notebook's kernel, IPython, or Python at its prompt."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


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
