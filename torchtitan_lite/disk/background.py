"""Work in the background: training comes first, on the processors and on the disk.

`give_way` is for whatever writes beside training, a thread or a process. `Background` is for work that no save waits
for, such as removing old checkpoints: one piece after another, in a thread that does not keep the process from ending.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable, Hashable

from torchtitan_lite.log import logger

NICE = 15
"""Of what writes: a compromise. Beside training that uses every core, at 10 steps take longer, at 19 the write takes
several times as long, and the next save waits for it (docs/performance.md)."""
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}


def give_way() -> None:
    """The calling thread, and those that it starts, come after others. There is no way back. Linux; else nothing."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):  # A sandbox may refuse it, and a save is worth more than its priority.
        os.nice(NICE)  # Of the thread: there each one has its own.
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        this_thread, best_effort_lowest = 0, (2 << 13) | 7
        ctypes.CDLL(None).syscall(number, 1, this_thread, best_effort_lowest)


class Background:
    """Runs what it is given in a thread that is there while there is work. Any thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: dict[Hashable, Callable[[], None]] = {}
        self._is_running = False
        self.is_closed = False
        """Whether what runs should end soon."""

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Have `work` run soon; once only if it is still to begin when `run` is called with the same `key` again."""
        with self._changed:
            self.is_closed = False
            self._waiting[key] = work
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run_all, name=self._name, daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Return whether nothing runs or is to run, after at most `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_running, seconds)

    def close(self, seconds: float) -> bool:
        """As `wait`; what is still to begin then never does."""
        is_over = self.wait(seconds)
        with self._changed:
            self.is_closed = True
            self._waiting.clear()
        return is_over

    def _run_all(self) -> None:
        give_way()
        while work := self._next():
            try:
                work()
            except Exception as error:
                logger.warning("What is done beside the saves (%s) failed: %s", self._name, error)

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            if self._waiting:
                return self._waiting.pop(next(iter(self._waiting)))
            self._is_running = False
            self._changed.notify_all()
            return None
