"""Events as the lines of events.jsonl: written as JSON objects, and read as any version wrote them. Without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field
from typing import Any, NamedTuple

from torchtitan_lite.events import EVENTS, Event, figures_of, is_figure

_LARGEST_STEP = 1 << 62


class Recorded(NamedTuple):
    """An event in events.jsonl."""

    time: float
    """Unix seconds."""
    event: Event

    def to_record(self) -> dict[str, Any]:
        """Return the object of its line."""
        return {"event": self.event.name, "step": self.event.step, "time": self.time} | self.event.figures


def parse_record(record: Mapping[str, Any]) -> Recorded | None:
    """Return the event in `record`, the object of a line; None for another program's, or a later version's.

    Figures that the event does not have are skipped. One that is missing, as older versions wrote fewer, or of another
    type, is its default, else NaN for a float, 0 for an int, and empty.
    """
    time, name, step = record.get("time"), record.get("event"), record.get("step")
    kind = EVENTS.get(name) if isinstance(name, str) else None
    if kind is None or not isinstance(step, int) or isinstance(step, bool) or abs(step) > _LARGEST_STEP:
        return None
    if not is_figure(time):
        return None
    figures = {field.name: _field_value(field, record.get(field.name)) for field in figures_of(kind)}
    return Recorded(float(time), kind(step, **figures))


def _field_value(field: Field[Any], value: object) -> Any:
    """Return `value` if it is of the type of `field`, else what stands for a figure that is not known."""
    kind = _KINDS[str(field.type).removesuffix(" | None")]
    if kind.fits(value):
        return kind.make(value)
    return kind.unknown if field.default is MISSING else field.default


class _Kind(NamedTuple):
    """A type of figures: which values of JSON fit, what makes one of them, what stands for one that is not known."""

    fits: Callable[[object], bool]
    make: Callable[[Any], object]
    unknown: object


_KINDS = {
    "int": _Kind(lambda value: isinstance(value, int) and is_figure(value), int, 0),
    "float": _Kind(is_figure, float, math.nan),
    "str": _Kind(lambda value: isinstance(value, str), str, ""),
    "tuple[str, ...]": _Kind(
        lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value), tuple, ()
    ),
    "Mapping[str, float]": _Kind(lambda value: isinstance(value, dict), dict, {}),
}
