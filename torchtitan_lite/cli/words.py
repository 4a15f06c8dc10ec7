"""Ages and counts as a person reads them, and paths in their own spelling."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def age(seconds: float) -> str:
    """Return `seconds` in the largest unit of which there are two, as in "3 d" or "90 min"; at least "0 s"."""
    for length, unit in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def count_text(value: int) -> str:
    """Return `value` with separators of thousands; the empty string for 0."""
    return f"{value:,}" if value else ""


def as_spelled(text: str, arguments: Sequence[str]) -> str:
    """Return `text` with the absolute path of each relative one among `arguments` in its own spelling."""
    # FOLDER:10 names a folder too, and so does --option=FOLDER.
    words = {word for each in arguments for word in (each, each.rpartition(":")[0], each.partition("=")[2])}
    spelled = {str(Path(word).absolute()): str(Path(word)) for word in words if word and not Path(word).is_absolute()}
    if not spelled:
        return text
    longest_first = "|".join(map(re.escape, sorted(spelled, key=len, reverse=True)))
    return re.sub(rf"(?<![\w./-])({longest_first})(?![\w.-])", lambda found: spelled[found[1]], text)
