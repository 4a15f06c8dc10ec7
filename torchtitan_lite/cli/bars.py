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

    What is not zero takes at least one column, if there is room.
    """
    total = sum(parts)
    if not total or not longest:
        return ""
    columns = max(1, round(total / longest * width))
    text, done, of_all = "", 0, 0
    for number, part in enumerate(parts):
        of_all += part
        end = round(of_all / total * columns)
        if part and end == done and done < columns:
            end += 1
        text += fills()[min(number, len(_BLOCKS) - 1)] * (end - done)
        done = max(done, end)
    return text
