"""What a run reports about itself at its start: log lines about the job, config.json, and configs.jsonl.

No later start trains by them. If a file cannot be written, that is one warning and the run continues.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from torchtitan_lite.config.job_config import CONFIG_FILE, JobConfig
from torchtitan_lite.config.manager import config_json
from torchtitan_lite.disk.durable import DISK
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.json_lines import JsonLines, whole_lines
from torchtitan_lite.log import logger

CONFIGS_FILE = "configs.jsonl"
"""The configuration of each start that had another one than the start before it. Checkpoints are purged, this stays."""


def announce(config: JobConfig, world: World, *, topology: str, num_params: int, seed: int, only_loads: bool) -> None:
    """Log the job, its model and its ranks; with job.print_args also the resolved configuration. **Any rank**."""
    logger.info("Starting job: %s", config.job.description)
    logger.info(
        "%s %s with %s parameters on %d x %s (%s), computing in %s, seed %d",
        config.model.name,
        config.model.config_path or config.model.flavor,
        f"{num_params:,}",
        world.world_size,
        "simulated" if world.is_simulated else world.device.type,
        topology,
        config.training.mixed_precision_param,
        seed,
    )
    if only_loads:
        logger.info(
            "This run only loads: it writes nothing into %s, no metrics either", Path(config.job.dump_folder).absolute()
        )
    if config.job.print_args:
        logger.info("Configuration: %s", config_json(config))


def write_config(dump_folder: Path, config: JobConfig) -> None:
    """Write the resolved configuration to config.json in `dump_folder`, and make the folder. **Coordinator only**."""
    try:
        DISK.make_dir(dump_folder)
        DISK.write_atomically(dump_folder / CONFIG_FILE, config_json(config).encode())
    except OSError as error:
        logger.warning("Could not write %s: %s. Training continues", dump_folder / CONFIG_FILE, error)
    _keep_config(dump_folder / CONFIGS_FILE, json.loads(config_json(config)))


def _keep_config(path: Path, config: dict[str, Any]) -> None:
    """Append `config` to the configurations in `path`, unless it is the last one there."""
    try:
        known = whole_lines(path.read_bytes())
    except OSError:
        known = []
    if not known or known[-1][1].get("config") != config:
        lines = JsonLines(path)
        lines.append({"time": time.time(), "config": config})
        lines.close()
