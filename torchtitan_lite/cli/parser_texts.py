"""The texts of the parser, tyro, in the words of this package and in the width of the terminal."""

from __future__ import annotations

import io
import re
import sys
import textwrap

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_EMPTY_DEFAULT = re.compile(r"\(default:((?:\x1b\[[0-9;]*m)*) ''\)")
_REWORDED = (
    (r"Missing value for argument '([\w-]+)'.*", r"\1: expected a value, found none"),
    (r"Error parsing ([\w-]+): invalid literal for int\(\).*: (.*)", r"\1: expected a whole number, found \2"),
    (r"Error parsing ([\w-]+): could not convert string to float: (.*)", r"\1: expected a number, found \2"),
    (
        r"[Ii]nvalid choice (.*) for argument '([\w-]+)'\. Expected one of \((?:'', )?(.*)\)\.",
        lambda found: f"{found[2]}: expected one of {found[3].replace(chr(39), '')}, found {found[1]}",
    ),
)
"""Findings of tyro, and how this package says them: the option, what was expected, what was found."""


def finding_in(report: str) -> str:
    """Return the finding in a report of tyro, which is a box with a title, a finding and remarks below it."""
    lines = [re.sub(r"^[│|]|[│|]$", "", line.rstrip()) for line in report.splitlines()]
    # Blocks, or ASCII where stdout is no UTF-8.
    rules = [at for at, line in enumerate(lines) if line[:1] in ("╭", "╰", "+") or {*line.strip()} <= {"─", "-"}]
    finding = lines[rules[0] + 1 : rules[1]] if len(rules) > 1 else lines
    # What is indented further is the help text of an argument.
    indented = textwrap.dedent("\n".join(finding)).splitlines()
    text = " ".join(" ".join(line for line in indented if not line.startswith(" " * 8)).split())
    for pattern, reworded in _REWORDED:
        text = re.sub(rf"\A{pattern}\Z", reworded, text)
    return f"{text[:1].lower()}{text[1:]}"


def fitted(help_text: str, columns: int) -> str:
    """Return a help of tyro, which folds the text in its boxes only, with the usage and the description folded too."""
    # Completion scripts are no help; all verbs in one line are wider than a terminal.
    if "usage:" not in help_text:
        return help_text
    short = re.sub(r"\A(.*usage:[^\n{]*)\{[^}\n]*\}", r"\1VERB ...", help_text)
    return "".join(_folded(line, columns) for line in map(_without_empty_default, short.splitlines(True)) if line)


def _without_empty_default(line: str) -> str:
    """Return `line` of a box without the default of an option that has none; "" if nothing else is in it."""
    bare = _EMPTY_DEFAULT.sub(rf"{' ' * 9}\1{' ' * 4}", line)  # As wide as before: the box stays in shape.
    return "" if bare != line and not _COLOURS.sub("", bare).strip(" │|\n") else bare


def _folded(line: str, columns: int) -> str:
    """Return `line` with line feeds in place of spaces, so that what is shown of it fits; a box stays as it is."""
    shown = _COLOURS.sub("", line.rstrip())
    if len(shown) <= columns or shown[0] in "╭│╰+|":
        return line
    lines, length = [""], 0
    for word in line.split(" "):
        width = len(_COLOURS.sub("", word.rstrip()))
        if length and length + width > columns:
            lines.append("")
            length = 0
        lines[-1] += f"{word} "
        length += width + 1
    return "\n".join(each.rstrip(" ") for each in lines)


class LikeStdout(io.StringIO):
    """A text that gets the same colours and characters as stdout."""

    @property
    def encoding(self) -> str:  # type: ignore[override]  # of a text without one
        return sys.stdout.encoding if sys.__stdout__ is None else sys.__stdout__.encoding

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()
