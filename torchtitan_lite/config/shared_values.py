"""What of a configuration must be the same on all ranks of a job.

All keys, but for those that only say where a host has its files, what one rank reports, or what a host traces. Of a
path counts whether there is one: who reads it compares what it leads to.
"""

from __future__ import annotations

from typing import Any

from torchtitan_lite.config.address import is_address, printable
from torchtitan_lite.config.drift import shown_setting
from torchtitan_lite.config.job_config import JobConfig, flat_config

_PATHS = frozenset(
    {
        *("checkpoint.folder", "checkpoint.export_folder", "checkpoint.upload_folder", "checkpoint.initial_load_path"),
        *("model.config_path", "model.tokenizer_path", "training.dataset_path"),
    }
)
_OF_A_HOST = frozenset(
    {
        *("job.config_file", "job.dump_folder", "job.description", "job.print_args", "training.tokens_folder"),
        *("metrics.enable_progress_bar", "metrics.prometheus_file", "metrics.enable_wandb", "comm.trace_buf_size"),
    }
)
_SECTION_OF_A_HOST = "profiling."


def shared_values(config: JobConfig) -> dict[str, str]:
    """Return by `section.key` what all ranks must have in common, as text."""
    return {
        key: _kind_of_path(value) if key in _PATHS else shown_setting(value)
        for key, value in flat_config(config.to_dict()).items()
        if key not in _OF_A_HOST and not key.startswith(_SECTION_OF_A_HOST)
    }


def _kind_of_path(value: Any) -> str:
    if value in (None, "", "bytes"):
        return shown_setting(value)
    return printable(value) if is_address(value) else "a path"
