"""The sections [job], [comm], [metrics] and [profiling]: what is around the training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchtitan_lite.config.checks import AtLeastOne, AtLeastZero, at_least, check_types, refuse_address
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import counted


@dataclass(frozen=True, kw_only=True)
class Job:
    """Where a job reads its configuration and writes its output, and its description."""

    config_file: str | None = None
    """TOML file with these sections; looked up as given, then in train_configs/."""

    dump_folder: str = "./outputs"
    """Folder for everything the run writes, relative to the working directory."""

    description: str = "default job"
    """Free text, logged at start."""

    print_args: bool = False
    """Log the resolved configuration at start."""

    def __post_init__(self) -> None:
        check_types(self, "job")
        refuse_address("job.dump_folder", self.dump_folder, "Name a folder, and copy it when the run is over.")


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Timeouts of collectives, their trace, hangs, and ranks that are only simulated."""

    init_timeout_seconds: AtLeastOne = 300
    """Timeout of collectives, in seconds, until the first step after this start is done."""

    train_timeout_seconds: AtLeastOne = 100
    """Timeout of collectives, in seconds, after the first step."""

    hang_seconds: int | Literal["auto"] = 0
    """Seconds without the end of a step after which the rank that hangs is named and all ranks are killed; 0: never.
    "auto": 10 times the slowest of the last 100 steps and at least 60, from step 10 of each start on. Saves do not
    count."""

    trace_buf_size: int = 20000
    """Entries in NCCL's flight recorder; 0: off."""

    simulated_ranks: AtLeastZero = 0
    """With checkpoint.dry_run: act as rank 0 of this many ranks, in one process and without the others; 0: off."""

    def __post_init__(self) -> None:
        check_types(self, "comm")
        at_least('comm.hang_seconds (or "auto")', 0 if self.hang_seconds == "auto" else self.hang_seconds, 0)
        if self.hang_seconds != "auto" and self.hang_seconds >= self.train_timeout_seconds:
            raise ConfigError(
                f"comm.hang_seconds: expected less than comm.train_timeout_seconds ({self.train_timeout_seconds}), "
                f"after which waiting ranks give up, found {self.hang_seconds}. Raise comm.train_timeout_seconds."
            )


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What is logged, and how often."""

    log_freq: AtLeastOne = 10
    """Steps between logged steps; step 1 is always logged."""

    enable_tensorboard: bool = False
    """Write TensorBoard files in addition to metrics.jsonl."""

    save_tb_folder: str = "tb"
    """Folder for TensorBoard files, inside job.dump_folder; the same one for all restarts of a run."""

    rank_0_only: bool = True
    """Write TensorBoard files from rank 0 only; if off, each rank writes to its own folder."""

    enable_progress_bar: bool = True
    """Show a progress bar below the log lines, while stderr is a terminal; in a pipe or a file there is none."""

    enable_wandb: bool = False
    """Log to Weights & Biases from rank 0; restarts continue the same run there. Needs the extra "wandb"; the project
    and the mode are those of WANDB_PROJECT and WANDB_MODE."""

    def __post_init__(self) -> None:
        check_types(self, "metrics")


@dataclass(frozen=True, kw_only=True)
class Profiling:
    """Traces of the time that steps take, and snapshots of the memory."""

    enable_profiling: bool = False
    """Write a torch.profiler trace every `profile_freq` steps."""

    save_traces_folder: str = "profile_traces"
    """Folder for traces, inside job.dump_folder."""

    profile_freq: AtLeastOne = 10
    """Steps between traces or snapshots."""

    profiler_active: AtLeastOne = 1
    """Steps in a trace, the last ones of the `profile_freq`; at most as many."""

    profiler_warmup: AtLeastZero = 3
    """Steps that the profiler runs without recording before those, so that its own start is not in the trace."""

    enable_memory_snapshot: bool = False
    """Write a snapshot of the CUDA allocator every `profile_freq` steps (CUDA only)."""

    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder for memory snapshots, inside job.dump_folder."""

    def __post_init__(self) -> None:
        check_types(self, "profiling")
        if self.profiler_active > self.profile_freq:
            raise ConfigError(
                "profiling.profiler_active: expected at most profiling.profile_freq, "
                f"{counted(self.profile_freq, 'step')}, found {self.profiler_active}. Raise profiling.profile_freq."
            )
