"""Checks of one value of the configuration, whose key is `name`."""

from __future__ import annotations

from torchtitan_lite.errors import ConfigError


def at_least(name: str, value: int, low: int) -> None:
    """Raise ConfigError if `value` is below `low`."""
    if value < low:
        raise ConfigError(f"{name}: expected at least {low}, found {value}.")


def positive(name: str, value: float) -> None:
    """Raise ConfigError unless `value` is positive and finite."""
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name}: expected a positive finite number, found {value}.")


def not_negative(name: str, value: float) -> None:
    """Raise ConfigError unless `value` is finite and at least 0."""
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{name}: expected a finite number of at least 0, found {value}.")


def choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name}: expected one of {', '.join(choices)}, found {value!r}.")
