"""The configuration of a training loop of one's own, made of keywords: only the checkpoints are configured there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_lite.config.address import is_in_object_store
from torchtitan_lite.config.checks import refuse_unknown_address
from torchtitan_lite.config.job_config import Checkpoint, Job, JobConfig
from torchtitan_lite.config.keys import KEYS, meaning_of, nearest_key
from torchtitan_lite.config.unsupported import UNSUPPORTED
from torchtitan_lite.config.value_kinds import command_line_text
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import logger

_SECTION = "checkpoint"
_NAMES_OF_FOLDER = frozenset(
    f"{what}{kind}"
    for what in ("", "checkpoint_", "checkpoints_", "ckpt_", "save_", "output_", "root_")
    for kind in ("dir", "directory", "path", "folder")
) - {"folder"} | {"dirpath", "root", "dump_folder"}
"""What other tools call `folder`."""
_REPLACED_BY = {
    "save_policy": (
        *("interval", "interval_type", "or_every_seconds", "at_steps", "enable_first_step_checkpoint"),
        *("mtbf_hours", "max_lost_seconds", "max_overhead"),
    ),
    "retention": ("keep_latest_k", "keep_every_n_steps", "keep_best_k", "keep_best_metric", "keep_for_hours"),
}
"""The keys whose question an argument answers."""


def refuse_replaced(settings: Mapping[str, Any], **is_given: bool) -> None:
    """Raise ConfigError if an argument that `is_given` answers a question that a key in `settings` answers, too."""
    for argument, keys in _REPLACED_BY.items():
        both = [name for name in settings if name in keys]
        if is_given[argument] and both:
            raise ConfigError(
                f"{argument}: found next to {', '.join(both)}, which it would replace. Leave out one or the other."
            )


def loop_config(folder: str | os.PathLike[str], settings: Mapping[str, Any]) -> JobConfig:
    """Return the configuration that saves into `folder`, with `settings` as keys of [checkpoint].

    Checkpoints are enabled unless `settings` say otherwise. torchtitan's other names of keys are accepted, and an
    `export_folder` lies next to `folder`. Raises ConfigError for an unknown key, naming the
    nearest one, and for a wrong value.
    """
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder) or not Path(folder).name:
        raise ConfigError(
            f"folder: expected the path of a folder for checkpoints, found {_shown_folder(folder)}. Give one, such as "
            "'outputs/checkpoint'."
        )
    refuse_unknown_address("folder", os.fspath(folder))
    keys = {_checkpoint_key(name): value for name, value in settings.items() if not _is_off(name, value)}
    if "folder" in keys:
        raise ConfigError("folder: given twice. Leave out checkpoint.folder.")
    parent, name = _folder_parts(os.fspath(folder))
    section = Checkpoint(**{"enable_checkpoint": True, **keys, "folder": name})
    return JobConfig(job=Job(dump_folder=parent), checkpoint=section)


def _folder_parts(folder: str) -> tuple[str, str]:
    """Return the `dump_folder` and the `checkpoint.folder` of `folder`; an address needs no folder above it."""
    if is_in_object_store(folder):
        return ".", folder
    path = Path(folder)
    return str(path.parent), path.name


def _shown_folder(folder: object) -> str:
    return repr(folder) if isinstance(folder, str | os.PathLike) else f"an object of {type(folder).__name__}"


def _is_off(name: str, value: object) -> bool:
    """Return whether `name` is the key of an unsupported feature, and off. Raise ConfigError if it is on."""
    unsupported = UNSUPPORTED.get(f"{_SECTION}.{name}")
    if unsupported is None:
        return False
    unsupported.check(f"{_SECTION}.{name}", command_line_text(value), name)
    logger.info("Ignored the key of an unsupported feature, which is off: %s", name)
    return True


def _checkpoint_key(name: str) -> str:
    if name in _NAMES_OF_FOLDER:
        raise ConfigError(
            f"{name} is not a key of [checkpoint]. Name where checkpoints are as folder='outputs/checkpoint'."
        )
    meaning = meaning_of(f"{_SECTION}.{name}")
    if meaning is not None and meaning.key in KEYS and not meaning.values:
        return meaning.key.partition(".")[2]
    nearest = nearest_key(f"{_SECTION}.{name}")
    fix = f"The nearest is {nearest.partition('.')[2]}" if nearest and nearest.startswith(f"{_SECTION}.") else ""
    raise ConfigError(f"{name} is not a key of [checkpoint]. {fix or 'None is near'}; docs/config.md lists all.")
