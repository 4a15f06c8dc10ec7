"""The section [profiling]: profiles of steps and of memory."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_lite.config.checks import at_least
from torchtitan_lite.config.field_types import check_types
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import counted


@dataclass(frozen=True, kw_only=True)
class Profiling:
    """Traces of the time that steps take, and snapshots of the memory."""

    enable_profiling: bool = False
    """Write a torch.profiler trace every `profile_freq` steps."""

    save_traces_folder: str = "profile_traces"
    """Folder for traces, inside job.dump_folder."""

    profile_freq: int = 10
    """Steps between traces or snapshots."""

    profiler_active: int = 1
    """Steps in a trace, the last ones of the `profile_freq`; at most as many."""

    profiler_warmup: int = 3
    """Steps that the profiler runs without recording before those, so that its own start is not in the trace."""

    enable_memory_snapshot: bool = False
    """Write a snapshot of the CUDA allocator every `profile_freq` steps (CUDA only)."""

    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder for memory snapshots, inside job.dump_folder."""

    def __post_init__(self) -> None:
        check_types(self, "profiling")
        at_least("profiling.profile_freq", self.profile_freq, 1)
        at_least("profiling.profiler_active", self.profiler_active, 1)
        at_least("profiling.profiler_warmup", self.profiler_warmup, 0)
        if self.profiler_active > self.profile_freq:
            raise ConfigError(
                "profiling.profiler_active: expected at most profiling.profile_freq, "
                f"{counted(self.profile_freq, 'step')}, found {self.profiler_active}. Raise profiling.profile_freq."
            )
