"""Numbers as a person reads them: sizes and ages."""

from __future__ import annotations

from torchtitan_lite.log import readable_bytes

_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def size(num_bytes: int) -> str:
    """Return `num_bytes` with a binary unit, as in "1.9 GiB"."""
    return readable_bytes(num_bytes)


def age(seconds: float) -> str:
    """Return `seconds` in the largest unit of which there are two, as in "3 d" or "90 min"; at least "0 s"."""
    for length, unit in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def number(value: int) -> str:
    """Return `value` with separators of thousands; the empty string for 0."""
    return f"{value:,}" if value else ""
