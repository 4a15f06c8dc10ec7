"""Cells of tables: bars of lengths whose parts differ without a colour, and long keys, folded after their dots."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.measure import Measurement


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


_INDENT = "  "


@dataclass(frozen=True)
class KeyCell:
    """The key `text`, which takes as many lines as the width asks for."""

    text: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        words = [len(_INDENT) + len(word) for word in _dotted_words(self.text)]
        return Measurement(min(max(words), options.max_width), min(len(self.text), options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield Text("\n".join(folded(self.text, options.max_width)), overflow="fold")


def folded(text: str, width: int) -> list[str]:
    """Return `text` in lines of at most `width` columns, cut after dots; a longer word has a line of its own."""
    lines = [""]
    for word in _dotted_words(text):
        if lines[-1].strip() and len(lines[-1]) + len(word) > width:
            lines.append(_INDENT)
        lines[-1] += word
    return lines


def _dotted_words(text: str) -> list[str]:
    words = text.split(".")
    return [f"{word}." for word in words[:-1]] + words[-1:]
