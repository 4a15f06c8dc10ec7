"""How much memory training takes.

On CUDA these are the allocator's peaks since the last call, under torchtitan's tags. On the CPU, where there is no such
allocator, it is the peak of the process since its start.
"""

from __future__ import annotations

import resource
import sys
from typing import Protocol

import torch

GIB = 1024**3


class MemoryMonitor(Protocol):
    """A source of memory figures."""

    def tags(self) -> dict[str, float]:
        """Return the peaks since the last call, by TensorBoard tag. The step line shows `memory/max_reserved(GiB)`."""


class CudaMemory:
    """The caching allocator of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._capacity = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.reset_peak_memory_stats(device)

    def tags(self) -> dict[str, float]:
        stats = torch.cuda.memory_stats(self._device)
        active, reserved = stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"]
        torch.cuda.reset_peak_memory_stats(self._device)
        return {
            "memory/max_active(GiB)": active / GIB,
            "memory/max_active(%)": 100 * active / self._capacity,
            "memory/max_reserved(GiB)": reserved / GIB,
            "memory/max_reserved(%)": 100 * reserved / self._capacity,
            "memory/num_alloc_retries": stats["num_alloc_retries"],
            "memory/num_ooms": stats["num_ooms"],
        }


class ProcessMemory:
    """The resident memory of this process."""

    def tags(self) -> dict[str, float]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {"memory/max_active(GiB)": peak / GIB, "memory/max_reserved(GiB)": peak / GIB}


def build_memory_monitor(device: torch.device) -> MemoryMonitor:
    """Return the monitor for `device`."""
    return CudaMemory(device) if device.type == "cuda" else ProcessMemory()
