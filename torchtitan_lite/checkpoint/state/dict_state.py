"""A plain dict as a state: a run's counters and best values, in the dict that the loop uses."""

from __future__ import annotations

from typing import Any


class DictState:
    """Saves the entries of `held`, and loads into that same dict: it then has the saved entries, and no others."""

    def __init__(self, held: dict[Any, Any]) -> None:
        self._held = held

    def state_dict(self) -> dict[Any, Any]:
        """Return a copy of the dict, with the values themselves."""
        return self._held.copy()

    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        self._held.clear()
        self._held.update(state_dict)
