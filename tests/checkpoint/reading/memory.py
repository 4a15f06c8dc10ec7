"""Measure the peak memory of a function, for tests that run it in a process of its own."""

from __future__ import annotations

import gc
import mmap
import re
from collections.abc import Callable
from pathlib import Path

import torch

MIB = 1 << 20
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"


def peak_above_before(work: Callable[[], object]) -> int:
    """Return how many bytes the peak memory of this process during `work`, shared memory included, is above before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    before = status_bytes("VmRSS")
    work()
    return status_bytes("VmHWM") - before


def status_bytes(name: str, status: Path = _STATUS) -> int:
    """Return a figure of /proc/PID/status in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", status.read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def untouched_zeros(num_bytes: int) -> torch.Tensor:
    """Return zeros that take no memory until they are written: the kernel maps one page of zeros for all of them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # Writing to gigabytes page by page takes many times as long.
    return torch.frombuffer(memory, dtype=torch.uint8)
