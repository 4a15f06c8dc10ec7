"""What the machine that starts a job, and each of its ranks, refuse with the same words; without torch."""

from __future__ import annotations

from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.errors import ConfigError


def refuse_shared_seed(config: JobConfig, num_processes: int) -> None:
    """Raise ConfigError if more than one process would make a seed checkpoint."""
    if config.checkpoint.create_seed_checkpoint and num_processes > 1:
        raise ConfigError(
            f"checkpoint.create_seed_checkpoint: expected one process, found {num_processes}. "
            "Run python train.py without torchrun; any number of processes can start from what it writes."
        )
