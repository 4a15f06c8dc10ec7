"""The machine of a measurement, and the time, processors and memory that work on it takes."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_TICKS = os.sysconf("SC_CLK_TCK")


def facts(folder: Path) -> dict[str, Any]:
    """Return the properties of this machine, and of the disk of `folder`, that explain the figures."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "processor": _processor(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "filesystem": _filesystem(folder),
        "load_average": os.getloadavg(),
    }


@dataclass
class Spent:
    """The time that a piece of work took."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """User and system time of this process and all its descendants."""


@contextmanager
def spending() -> Iterator[Spent]:
    """Measure the block."""
    spent = Spent()
    cpu, began = cpu_seconds(), time.perf_counter()
    yield spent
    spent.seconds = time.perf_counter() - began
    spent.cpu_seconds = cpu_seconds() - cpu


def cpu_seconds() -> float:
    """Return the CPU seconds so far of this process, of its running descendants and of those it has waited for."""
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    return total + sum(map(_cpu_seconds_of, descendants(os.getpid())))


class PeakMemory:
    """The peak of this process's memory above its memory at the start."""

    def __init__(self) -> None:
        # 5 resets the kernel's high-water mark to the current memory (proc(5)).
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._before = _status("VmRSS")

    def extra_bytes(self) -> int:
        """Return the extra bytes so far, pages of mapped files included."""
        return max(0, _status("VmHWM") - self._before)


def has_resettable_peak() -> bool:
    """Return whether the kernel lets a process reset its high-water mark."""
    try:
        PeakMemory()
    except OSError:
        return False
    return True


def copy(pieces: Sequence[tuple[int, int]], to: int, run: Callable[[list[tuple[int, int, int]]], None]) -> None:
    """Copy `pieces` (address, bytes) one after another to address `to`; `run` executes the copies."""
    jobs, at = [], to
    for address, num_bytes in pieces:
        for begin in range(0, num_bytes, 16 << 20):
            count = min(16 << 20, num_bytes - begin)
            jobs.append((at + begin, address + begin, count))
        at += num_bytes
    run(jobs)


def move(job: tuple[int, int, int]) -> None:
    """Copy (to, from, bytes). Releases the GIL."""
    ctypes.memmove(*job)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def descendants(pid: int) -> Iterator[int]:
    """Yield the pids of the children of `pid`, and of theirs."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            pids = [int(word) for word in children.read_text(encoding="ascii").split()]
        except OSError:
            continue
        for child in pids:
            yield child
            yield from descendants(child)


def _cpu_seconds_of(pid: int) -> float:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _filesystem(folder: Path) -> str:
    found = subprocess.run(
        ["findmnt", "-no", "FSTYPE,SOURCE,OPTIONS", "-T", str(folder)], capture_output=True, text=True, check=False
    )
    return " ".join(found.stdout.split()) or "unknown"
