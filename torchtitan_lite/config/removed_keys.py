"""Keys and values that the configuration no longer has, and those that replace them.

To set one is an error that names its replacement.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtitan_lite.errors import ConfigError

_DIGESTS = {
    "checkpoint.tensor_digests": "save",
    "checkpoint.verify_resume": "load",
    "checkpoint.debug_staging": "staging",
}
"""The switches that `checkpoint.digest_tensors` replaces, and the name that stands in it for each."""

REMOVED: Mapping[str, str] = {
    "checkpoint.keep_best_mode": 'Set checkpoint.keep_best_metric to "NAME" for the lowest values, or to "max:NAME" '
    "for the highest",
    **{key: f'To switch it on, add "{name}" to checkpoint.digest_tensors' for key, name in _DIGESTS.items()},
}
"""Key to the fix, as the refusal says it."""


_REMOVED_VALUES: Mapping[tuple[str, object], str] = {
    ("checkpoint.interval_type", "continuous"): 'Set "auto", or "seconds" with checkpoint.interval, such as 30',
}
"""Key and value to the fix."""


def refuse_removed_value(key: str, value: object, where: str) -> None:
    """Raise ConfigError, with what replaces it, if `value` is one that `key` no longer has."""
    if isinstance(value, str) and (fix := _REMOVED_VALUES.get((key, value))):
        raise ConfigError(f"{where} = {value}: this value is not supported any more. {fix}.")


def flat(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration by `section.key`; what is no section keeps its own name."""
    values: dict[str, Any] = {}
    for section, keys in sections.items():
        if isinstance(keys, dict):
            values |= {f"{section}.{key}": value for key, value in keys.items()}
        else:
            values[section] = keys
    return values
