"""Bars of characters: lengths that can be compared, in parts that differ without a colour."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_BLOCKS = "█▓▒░"
_LETTERS = "#=+-"


def fills() -> str:
    """Return the characters of the parts of a bar: blocks where stdout's encoding has them, else ASCII."""
    try:
        _BLOCKS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return _LETTERS
    return _BLOCKS


def bar(parts: Sequence[int], longest: int, width: int) -> str:
    """Return a bar of the lengths `parts`, each in its own character, in which `longest` would take `width` columns.

    Each part that is not zero takes at least one column; the largest makes up for that.
    """
    total = sum(parts)
    if not total or not longest:
        return ""
    columns = max(1, round(total / longest * width))
    widths = [max(1, int(part / total * columns)) if part else 0 for part in parts]
    largest = parts.index(max(parts))
    widths[largest] = max(1, widths[largest] + columns - sum(widths))
    return "".join(fill(number) * each for number, each in enumerate(widths))


def fill(number: int) -> str:
    """Return the character of part `number` of a bar; the last one stands for all further parts, too."""
    return fills()[min(number, len(_BLOCKS) - 1)]
