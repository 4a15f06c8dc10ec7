"""A state of the user that returns what it was given."""

from __future__ import annotations

from typing import Any


class Held:
    """A state that holds the given values."""

    def __init__(self, **values: Any) -> None:
        self.values: dict[str, Any] = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = dict(state_dict)
