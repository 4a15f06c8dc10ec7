"""How much memory something takes at its peak, for tests that run it in a process of its own."""

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
    """Bytes of memory, shared ones included, that this process had at most during `work`, less those before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    before = status_bytes("VmRSS")
    work()
    return status_bytes("VmHWM") - before


def status_bytes(name: str, status: Path = _STATUS) -> int:
    """A figure of /proc/PID/status."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", status.read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def untouched_zeros(num_bytes: int) -> torch.Tensor:
    """So many bytes that are no memory until they are written: all of them read from one page of zeros."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # Writing to gigabytes page by page takes many times as long.
    return torch.frombuffer(memory, dtype=torch.uint8)
