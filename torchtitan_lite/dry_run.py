"""What a start would do, for `checkpoint.dry_run`: the lines after the plan, and the exit code. Changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.log import logger


def report_start(manager: CheckpointManager, config: JobConfig, check_weights: Callable[[Path], object]) -> int:
    """Log whether the run would end, resume, import weights or start from scratch; return the exit code.

    **Collective**. `check_weights` raises for weights to import that are not those of the model.
    """
    steps, dump_folder = config.training.steps, Path(config.job.dump_folder).absolute()
    if ended := manager.ended():
        logger.info("It would end at once. Training completed: %s", ended.summary(steps))
        return 0
    if manager.lacks_only_hugging_face():
        logger.info("Nothing is left to train, but the weights would be written in Hugging Face's format")
        return 0
    if source := manager.would_import():
        check_weights(source)
        logger.info("It would import %s as step 0 into %s, and start from there", source, dump_folder)
        return 0
    report = manager.dry_run()
    logger.info("%s", report or f"No checkpoint in {dump_folder}: it would be a fresh start")
    if report is not None and report.step >= steps and not report.refusals:
        export = ", but its weights would be exported" if config.checkpoint.export_folder else ""
        logger.info("Nothing is left to train after step %d%s", report.step, export)
    return 1 if report is not None and report.refusals else 0


# The configuration that a dry run builds its objects by: nothing that matters only to objects that compute.


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
