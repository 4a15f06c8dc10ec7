"""The configuration that a dry run builds its objects by: nothing that matters only to objects that compute."""

from __future__ import annotations

import dataclasses

from torchtitan_lite.config.job_config import JobConfig


def as_built(config: JobConfig) -> JobConfig:
    """Return `config`; of a dry run, without compilation, fused kernels and, with simulated ranks, CPU offload."""
    if not config.checkpoint.dry_run:
        return config
    # Offloading needs an accelerator, which the machine of simulated ranks may lack and those of real ones must have.
    offloads = config.training.enable_cpu_offload and not config.comm.simulated_ranks
    training = dataclasses.replace(config.training, compile=False, enable_cpu_offload=offloads)
    # Not fused: torch has no fused kernels for the meta device.
    optimizer = dataclasses.replace(config.optimizer, implementation="foreach")
    return dataclasses.replace(config, training=training, optimizer=optimizer)
