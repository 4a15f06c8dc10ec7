"""The moments of a start, appended to the file BENCH_RESTART_TIMES by every rank.

A line is written to the kernel at once, so a SIGKILL loses none. Times are of the clock CLOCK_BOOTTIME, which all
processes share.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

FILE = os.environ.get("BENCH_RESTART_TIMES", "")


def stamp(what: str, step: int = 0, at: float | None = None) -> None:
    """Append that this rank has done `what`, now or at the time `at`."""
    line = {
        "what": what,
        "step": step,
        "at": time.clock_gettime(time.CLOCK_BOOTTIME) if at is None else at,
        "rank": int(os.environ.get("BENCH_RESTART_RANK") or os.environ["RANK"]),
        "pid": os.getpid(),
    }
    fd = os.open(FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, (json.dumps(line) + "\n").encode())
    os.close(fd)


def stamp_process() -> None:
    """Append when the kernel started this process."""
    ticks = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19]
    stamp("process", at=int(ticks) / os.sysconf("SC_CLK_TCK"))
