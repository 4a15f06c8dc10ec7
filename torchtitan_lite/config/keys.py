"""Every name that a user may give a key, and the key that it stands for.

A name is looked up among the fields of `JobConfig`, then among their aliases, then among the keys of unsupported
features. A name that is none of these is an error that names the nearest key, in a TOML file and on the command line
alike.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import get_type_hints

from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.config.unsupported import CONVERSION, SECTIONS_OF_CONVERSION, UNSUPPORTED
from torchtitan_lite.config.value_kinds import ValueKind
from torchtitan_lite.errors import ConfigError

# Other names for keys: those of torchtitan's versions of October 2024 to February 2026, its last one with TOMLs.
#
# Where a switch became a choice, the values under the other name are mapped, too. Keys of [parallelism] are also
# accepted in [training] and [experimental], their former sections.


ALIASES: Mapping[str, str] = {
    "job.print_config": "job.print_args",
    "metrics.save_for_all_ranks": "metrics.rank_0_only",
    "model.hf_assets_path": "model.tokenizer_path",
    "optimizer.fused": "optimizer.implementation",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.local_batch_size": "training.batch_size",
    "compile.enable": "training.compile",
    "debug.seed": "training.seed",
    "debug.deterministic": "training.deterministic",
    "checkpoint.enable": "checkpoint.enable_checkpoint",
    "checkpoint.last_save_model_only": "checkpoint.model_weights_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.model_weights_only",
    "checkpoint.last_save_in_safetensors_format": "checkpoint.last_save_in_hf",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
}

FORMER_SWITCHES: Mapping[str, Mapping[str, str]] = {
    "metrics.save_for_all_ranks": {"true": "false", "false": "true"},
    "optimizer.fused": {"true": "fused", "false": "foreach"},
}
"""What "true" and "false" under some of these names mean for the key."""
VALUE_ALIASES: Mapping[str, Mapping[str, str]] = {
    "model.name": {"llama": "llama3"},
    "checkpoint.interval_type": {"step": "steps", "second": "seconds"},
}

FORMER_SECTIONS_OF_PARALLELISM = ("training", "experimental")


SECTIONS: Mapping[str, type] = get_type_hints(JobConfig)
KEYS: Mapping[str, ValueKind] = {
    f"{section}.{name}": ValueKind.of(annotation)
    for section, cls in SECTIONS.items()
    for name, annotation in get_type_hints(cls).items()
}
KNOWN_SECTIONS = frozenset(name.partition(".")[0] for name in (*KEYS, *ALIASES, *UNSUPPORTED)) | {"experimental"}


@dataclass(frozen=True)
class Meaning:
    """The key that a name stands for, the kind of value to give under that name, and what its values become."""

    key: str
    kind: ValueKind
    values: Mapping[str, str] = field(default_factory=dict)


def meaning_of(name: str) -> Meaning | None:
    """Return the meaning of `name`, spelled section.key; None if it is unknown."""
    if name in KEYS:
        return Meaning(name, KEYS[name])
    if name in ALIASES:
        key, values = ALIASES[name], FORMER_SWITCHES.get(name, {})
        return Meaning(key, ValueKind(bool) if values else KEYS[key], values)
    if name in UNSUPPORTED:
        return Meaning(name, UNSUPPORTED[name].kind)
    section, _, key = name.partition(".")
    return meaning_of(f"parallelism.{key}") if section in FORMER_SECTIONS_OF_PARALLELISM else None


def unknown_key(name: str, where: str) -> ConfigError:
    """Return the error for an unknown name, with the nearest key."""
    if name.partition(".")[0] in SECTIONS_OF_CONVERSION:
        return ConfigError(f"{where}: {CONVERSION} is not supported. Leave it out.")
    nearest = nearest_key(name)
    hint = f"The nearest is {nearest}" if nearest else "None is near"
    return ConfigError(f"{where} is not a key. {hint}; train.py --help lists all.")


def unknown_section(name: str, where: str) -> ConfigError:
    """Return the error for an unknown section, with the nearest one."""
    nearest = _closest(name, SECTIONS)
    hint = f"The nearest is [{nearest}]; there are" if nearest else "There are"
    return ConfigError(f"{where}: [{name}] is not a section. {hint} {', '.join(SECTIONS)}.")


def nearest_key(name: str) -> str | None:
    """Return the key that `name`, section.key, most likely means; None if none is near."""
    section, _, key = name.rpartition(".")
    inside = _closest(key, [known.partition(".")[2] for known in KEYS if known.startswith(f"{section}.")])
    if inside:
        return f"{section}.{inside}"
    elsewhere = [known for known in KEYS if known.partition(".")[2] == key]
    return elsewhere[0] if len(elsewhere) == 1 else _closest(name, [*KEYS, *ALIASES], cutoff=0.8)


def _closest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)), None)
