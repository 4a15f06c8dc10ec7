"""Who comes first, on the processors and on the disk: training, not what writes in the background."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys

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
