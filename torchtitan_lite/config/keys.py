"""Every name that a user may give a key, and the key that it stands for.

A name is looked up among the fields of `JobConfig`, then among their aliases, then among the keys of unsupported
features. A name that is none of these is an error that names the nearest key, in a TOML file and on the command line
alike.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import get_type_hints

from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.config.unsupported import CONVERSION, SECTIONS_OF_CONVERSION, UNSUPPORTED
from torchtitan_lite.config.value_kinds import ValueKind
from torchtitan_lite.errors import ConfigError

# Other names for keys: those of torchtitan's versions of October 2024 to February 2026, its last one with TOMLs.
#
# An alias stands for one key. Where a switch became a choice, the alias also maps its values. Keys of [parallelism] are
# also accepted in [training] and [experimental], their former sections.


@dataclass(frozen=True)
class Alias:
    """Another name for `key`. With `values` it is a switch whose "true" and "false" become these values of the key."""

    key: str
    values: Mapping[str, str] = field(default_factory=dict)


ALIASES: Mapping[str, Alias] = {
    "job.print_config": Alias("job.print_args"),
    "metrics.save_for_all_ranks": Alias("metrics.rank_0_only", {"true": "false", "false": "true"}),
    "model.hf_assets_path": Alias("model.tokenizer_path"),
    "optimizer.fused": Alias("optimizer.implementation", {"true": "fused", "false": "foreach"}),
    "lr_scheduler.lr_min": Alias("lr_scheduler.min_lr_factor"),
    "training.warmup_steps": Alias("lr_scheduler.warmup_steps"),
    "training.local_batch_size": Alias("training.batch_size"),
    "compile.enable": Alias("training.compile"),
    "debug.seed": Alias("training.seed"),
    "debug.deterministic": Alias("training.deterministic"),
    "checkpoint.enable": Alias("checkpoint.enable_checkpoint"),
    "checkpoint.last_save_model_only": Alias("checkpoint.model_weights_only"),
    "checkpoint.last_save_model_weights_only": Alias("checkpoint.model_weights_only"),
    "checkpoint.last_save_in_safetensors_format": Alias("checkpoint.last_save_in_hf"),
    "checkpoint.initial_load_model_weights_only": Alias("checkpoint.initial_load_model_only"),
}

VALUE_ALIASES: Mapping[str, Mapping[str, str]] = {
    "model.name": {"llama": "llama3"},
    "checkpoint.interval_type": {"step": "steps", "second": "seconds"},
}

FORMER_SECTIONS_OF_PARALLELISM = ("training", "experimental")


def _section_types() -> dict[str, type]:
    hints = get_type_hints(JobConfig)
    return {section.name: hints[section.name] for section in fields(JobConfig)}


SECTIONS: Mapping[str, type] = _section_types()
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
        alias = ALIASES[name]
        return Meaning(alias.key, ValueKind(bool) if alias.values else KEYS[alias.key], alias.values)
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
