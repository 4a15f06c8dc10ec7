"""The machine that is measured on: its facts, and what a piece of work took of it."""

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
    """What a reader of the figures wants to know of this machine, and of the disk that `folder` is on."""
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
    """What a piece of work took."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of this process and all below it, in user and system mode."""


@contextmanager
def spending() -> Iterator[Spent]:
    """Measures what is done within."""
    spent = Spent()
    cpu, began = cpu_seconds(), time.perf_counter()
    yield spent
    spent.seconds = time.perf_counter() - began
    spent.cpu_seconds = cpu_seconds() - cpu


def cpu_seconds() -> float:
    """Used so far by this process, by the processes below it that live, and by those it has waited for."""
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    return total + sum(map(_cpu_seconds_of, _below(os.getpid())))


class PeakMemory:
    """The most memory that this process had beyond what it has now."""

    def __init__(self) -> None:
        # 5 sets the kernel's high-water mark to what is there now (proc(5)).
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._before = _status("VmRSS")

    def extra_bytes(self) -> int:
        """So far. Pages of mapped files count."""
        return max(0, _status("VmHWM") - self._before)


def memory_before_a_peak_can_be_told() -> bool:
    """Whether the kernel lets a process set its high-water mark."""
    try:
        PeakMemory()
    except OSError:
        return False
    return True


def copy(pieces: Sequence[tuple[int, int]], to: int, run: Callable[[list[tuple[int, int, int]]], None]) -> None:
    """The memory of `pieces` (address, bytes) is at address `to`, one after another; `run` does the copies."""
    jobs, at = [], to
    for address, num_bytes in pieces:
        for begin in range(0, num_bytes, 16 << 20):
            count = min(16 << 20, num_bytes - begin)
            jobs.append((at + begin, address + begin, count))
        at += num_bytes
    run(jobs)


def move(job: tuple[int, int, int]) -> None:
    """Copies (to, from, bytes). Lets other threads run."""
    ctypes.memmove(*job)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def _below(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            pids = [int(word) for word in children.read_text(encoding="ascii").split()]
        except OSError:
            continue
        for child in pids:
            yield child
            yield from _below(child)


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
