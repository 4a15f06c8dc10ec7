"""The section [metrics]: what a job logs, and where."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_lite.config.checks import at_least
from torchtitan_lite.config.field_types import check_types
from torchtitan_lite.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What is logged, and how often."""

    log_freq: int = 10
    """Steps between logged steps; step 1 is always logged."""

    enable_tensorboard: bool = False
    """Write TensorBoard files in addition to metrics.jsonl."""

    save_tb_folder: str = "tb"
    """Folder for TensorBoard files, inside job.dump_folder; the same one for all restarts of a run."""

    rank_0_only: bool = True
    """Write TensorBoard files from rank 0 only; if off, each rank writes to its own folder."""

    enable_progress_bar: bool = True
    """Show a progress bar below the log lines, while stderr is a terminal; in a pipe or a file there is none."""

    prometheus_file: str = ""
    """File for Prometheus' textfile collector, inside job.dump_folder or absolute; empty for none. Its name must end
    with ".prom". Rank 0 replaces it every four seconds."""

    enable_wandb: bool = False
    """Log to Weights & Biases from rank 0; restarts continue the same run there. Needs the extra "wandb"; the project
    and the mode are those of WANDB_PROJECT and WANDB_MODE."""

    def __post_init__(self) -> None:
        check_types(self, "metrics")
        at_least("metrics.log_freq", self.log_freq, 1)
        if self.prometheus_file and not self.prometheus_file.endswith(".prom"):
            raise ConfigError(
                f'metrics.prometheus_file: expected a name that ends with ".prom", which is what the collector reads, '
                f"found {self.prometheus_file!r}."
            )
