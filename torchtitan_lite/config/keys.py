"""Every name that a key may be given by, and what it stands for.

The fields of `JobConfig` come first, then their aliases, then the keys whose feature is not here. A
name that is none of these is an error that says which key is nearest, wherever it was written.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import get_type_hints

from torchtitan_lite.config.aliases import ALIASES, FORMER_SECTIONS_OF_PARALLELISM
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.config.kinds import Kind
from torchtitan_lite.config.unsupported import UNSUPPORTED
from torchtitan_lite.errors import ConfigError


def _sections() -> dict[str, type]:
    hints = get_type_hints(JobConfig)
    return {section.name: hints[section.name] for section in fields(JobConfig)}


SECTIONS: Mapping[str, type] = _sections()
KEYS: Mapping[str, Kind] = {
    f"{section}.{name}": Kind.of(annotation)
    for section, cls in SECTIONS.items()
    for name, annotation in get_type_hints(cls).items()
}
KNOWN_SECTIONS = frozenset(name.partition(".")[0] for name in (*KEYS, *ALIASES, *UNSUPPORTED)) | {"experimental"}


@dataclass(frozen=True)
class Meaning:
    """What a name stands for: a key, the kind that is written under this name, and what its values become."""

    key: str
    kind: Kind
    values: Mapping[str, str] = field(default_factory=dict)


def meaning_of(name: str) -> Meaning | None:
    """What `name`, section.key, stands for; None for a name that nobody knows."""
    if name in KEYS:
        return Meaning(name, KEYS[name])
    if name in ALIASES:
        alias = ALIASES[name]
        return Meaning(alias.key, Kind(bool) if alias.values else KEYS[alias.key], alias.values)
    if name in UNSUPPORTED:
        return Meaning(name, UNSUPPORTED[name].kind)
    section, _, key = name.partition(".")
    return meaning_of(f"parallelism.{key}") if section in FORMER_SECTIONS_OF_PARALLELISM else None


def unknown_key(name: str, where: str) -> ConfigError:
    """The error for a name that nobody knows."""
    nearest = nearest_key(name)
    mend = f"The nearest is {nearest}" if nearest else "None is near"
    return ConfigError(f"{where} is not a key. {mend}; train.py --help lists all.")


def unknown_section(name: str, where: str) -> ConfigError:
    """The error for a section that nobody knows."""
    nearest = _closest(name, SECTIONS)
    mend = f"The nearest is [{nearest}]; there are" if nearest else "There are"
    return ConfigError(f"{where}: [{name}] is not a section. {mend} {', '.join(SECTIONS)}.")


def nearest_key(name: str) -> str | None:
    section, _, key = name.rpartition(".")
    inside = _closest(key, [known.partition(".")[2] for known in KEYS if known.startswith(f"{section}.")])
    if inside:
        return f"{section}.{inside}"
    elsewhere = [known for known in KEYS if known.partition(".")[2] == key]
    return elsewhere[0] if len(elsewhere) == 1 else _closest(name, [*KEYS, *ALIASES], cutoff=0.8)


def _closest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)), None)
