"""A long key in a cell of a table: folded after its dots, where a person would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.measure import Measurement

_INDENT = "  "


@dataclass(frozen=True)
class KeyCell:
    """The key `text`, which takes as many lines as the width asks for."""

    text: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        words = [len(_INDENT) + len(word) for word in _words(self.text)]
        return Measurement(min(max(words), options.max_width), min(len(self.text), options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield Text("\n".join(folded(self.text, options.max_width)), overflow="fold")


def folded(text: str, width: int) -> list[str]:
    """Return `text` in lines of at most `width` columns, cut after dots; a longer word has a line of its own."""
    lines = [""]
    for word in _words(text):
        if lines[-1].strip() and len(lines[-1]) + len(word) > width:
            lines.append(_INDENT)
        lines[-1] += word
    return lines


def _words(text: str) -> list[str]:
    words = text.split(".")
    return [f"{word}." for word in words[:-1]] + words[-1:]
