"""The clocks of a run in a checkpoint: they differ between two runs that are the same otherwise.

A clock is known by its name next to the other names of a `TrainState`, under whatever name that was given to a manager.
Without torch.
"""

from __future__ import annotations

from collections.abc import Collection

CLOCKS = ("run_seconds", "productive_seconds")
"""Fields of a `TrainState` that no training depends on."""
_COUNTERS = ("step", "n_tokens_seen", "log_steps")
"""Fields of a `TrainState` of every version: a user's state may have a `run_seconds` of its own."""


def is_clock(key: str, keys: Collection[str]) -> bool:
    """Return whether `key`, one of the `keys` of a checkpoint, is a clock of its run."""
    state, dot, name = key.rpartition(".")
    return name in CLOCKS and all(f"{state}{dot}{field}" in keys for field in _COUNTERS)
