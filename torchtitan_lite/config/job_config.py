"""The configuration of a job, as plain values.

Each section is one frozen dataclass and each key has one doc string; `--help`, docs/config.md and the validation are
made from them. Nothing here reads a file or the environment, or imports torch. A `build_*` function next to each object
turns values into that object. A `JobConfig` that exists is consistent in itself; what depends on the machine (ranks,
devices, folders) is checked where it is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_lite.config.checks import check_sections
from torchtitan_lite.config.sections.checkpoint import Checkpoint
from torchtitan_lite.config.sections.job import Comm, Job, Metrics, Profiling
from torchtitan_lite.config.sections.training import (
    ActivationCheckpoint,
    LRScheduler,
    Model,
    Optimizer,
    Parallelism,
    Training,
)
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import counted

__all__ = [
    "ActivationCheckpoint",
    "Checkpoint",
    "Comm",
    "Job",
    "JobConfig",
    "LRScheduler",
    "Metrics",
    "Model",
    "Optimizer",
    "Parallelism",
    "Profiling",
    "Training",
]

CONFIG_FILE = "config.json"
"""The resolved configuration, in job.dump_folder."""
EXCLUDABLE_STATES = ("optimizer", "lr_scheduler", "dataloader", "train_state", "rng")


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """The configuration of a job: one field a section."""

    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    comm: Comm = field(default_factory=Comm)

    def __post_init__(self) -> None:
        check_sections(self)
        if self.comm.simulated_ranks and not self.checkpoint.dry_run:
            raise ConfigError(
                f"comm.simulated_ranks: {counted(self.comm.simulated_ranks, 'rank')} can be simulated only by "
                "a dry run, which trains nothing. Add --checkpoint.dry_run, or leave comm.simulated_ranks out."
            )
        if self.training.on_divergence == "rollback" and (
            not self.checkpoint.enable_checkpoint or self.checkpoint.load_only
        ):
            raise ConfigError(
                "training.on_divergence: 'rollback' needs a run that saves checkpoints. Set "
                "--checkpoint.enable_checkpoint, without load_only, or --training.on_divergence=stop."
            )
        own = Path(self.job.dump_folder).absolute()
        if self.model.config_path and Path(self.model.config_path).absolute() in (own, own / CONFIG_FILE):
            raise ConfigError(
                f"model.config_path: {self.model.config_path!r} is where the run writes its own {CONFIG_FILE}, in "
                "job.dump_folder. Move the model's file into another folder."
            )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the configuration as plain values, {section: {key: value}}; config.json holds it."""
        return dataclasses.asdict(self)


def flat_config(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration by `section.key`; what is no section keeps its own name."""
    values: dict[str, Any] = {}
    for section, keys in sections.items():
        if isinstance(keys, dict):
            values |= {f"{section}.{key}": value for key, value in keys.items()}
        else:
            values[section] = keys
    return values
