"""Events of a run for tests of what reads them."""

from __future__ import annotations

import dataclasses
from typing import Any

from torchtitan_lite.event_lines import parse_record
from torchtitan_lite.events import Event


def an_event(name: str, step: int, **figures: Any) -> Event:
    """Return the event of this name; its other figures are zero, empty or not known."""
    recorded = parse_record({"event": name, "step": step, "time": 0.0} | figures)
    assert recorded is not None, f"{name} is no event"
    event = recorded.event
    unknown = [each for each, value in event.figures.items() if value != value]
    return dataclasses.replace(event, **dict.fromkeys(unknown, 0.0))
