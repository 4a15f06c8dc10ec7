"""The texts of the parser, tyro, in the words of this package and in the width of the terminal."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable, Sequence

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_REWORDED = (
    (
        r"Missing value for argument '([\w-]+)'.*",
        lambda found: f"{found[1] if found[1].startswith('-') else found[1].upper()}: expected a value, found none",
    ),
    (r"[Uu]nrecognized options: ((?!-).*)", r"expected no further argument, found \1"),
    (r"Error parsing ([\w-]+): invalid literal for int\(\).*: (.*)", r"\1: expected a whole number, found \2"),
    (r"Error parsing ([\w-]+): could not convert string to float: (.*)", r"\1: expected a number, found \2"),
    (
        r"[Ii]nvalid choice (.*) for argument '([\w-]+)'\. Expected one of \((?:'', )?(.*)\)\.",
        lambda found: f"{found[2]}: expected one of {found[3].replace(chr(39), '')}, found {found[1]}",
    ),
)
"""Findings of tyro, and how this package says them: the option, what was expected, what was found."""


RENAMED_OPTIONS = {
    "--keep-every": "--keep-every-n-steps",
    "--ttl-hours": "--keep-for-hours",
    "--mode": "--metric max:NAME",
    "--out": "OUT, an argument without an option's name",
}
"""Options of earlier versions, and what replaces each."""


def finding_in(report: str) -> str:
    """Return the finding in a report of tyro, which is a box with a title, a finding and remarks below it."""
    # tyro colours what it writes to stderr if stdout is a terminal.
    lines = [re.sub(r"^[│|]|[│|]$", "", line.rstrip()) for line in _COLOURS.sub("", report).splitlines()]
    # Blocks, or ASCII where stdout is no UTF-8.
    rules = [at for at, line in enumerate(lines) if line[:1] in ("╭", "╰", "+") or {*line.strip()} <= {"─", "-"}]
    finding = lines[rules[0] + 1 : rules[1]] if len(rules) > 1 else lines
    # What is indented further is the help text of an argument.
    indented = textwrap.dedent("\n".join(finding)).splitlines()
    text = " ".join(" ".join(line for line in indented if not line.startswith(" " * 8)).split())
    for pattern, reworded in _REWORDED:
        text = re.sub(rf"\A{pattern}\Z", reworded, text)
    return text if text[:2].isupper() else f"{text[:1].lower()}{text[1:]}"  # FOLDER stays as it is.


def unknown_options(arguments: Sequence[str], fields: Iterable[str]) -> str:
    """Return a finding about the options in `arguments` that are none of `fields`, with the fix; empty for none."""
    known = {"-h", "--help", *(f"--{field.replace('_', '-')}" for field in fields)}
    given = [each.partition("=")[0].replace("_", "-") for each in arguments if re.match("--?[a-zA-Z]", each)]
    unknown = [option for option in given if option not in known]
    hints = [f"; {option} is now {RENAMED_OPTIONS[option]}" for option in unknown if option in RENAMED_OPTIONS]
    if len(unknown) == 1 and not hints:
        hints = [f"; the nearest is {near}" for near in difflib.get_close_matches(unknown[0], known, n=1)]
    return f"unrecognized options: {', '.join(unknown)}{''.join(hints)}" if unknown else ""


def default_in_words(default: object) -> str:
    """Return what the help of an option says of its default: nothing of one that switches something off."""
    return f"(default: {default})" if default else ""


def fitted(help_text: str, columns: int, *, with_verbs: bool = False) -> str:
    """Return a help of tyro, which folds the text in its boxes only, with the usage and the description folded too.

    `with_verbs`: it is that of all verbs, and the usage has them in one line.
    """
    if "usage:" not in help_text:  # A script that completes verbs.
        return help_text
    # A line of a box is empty after a text that fills the one before, if no default follows.
    lines = [line for line in help_text.splitlines(True) if "│" not in line or _in_box(line)]
    if with_verbs:
        # The usage shows that one of them is required.
        lines = [line for line in lines if _in_box(line) != "(required)"]
        lines[0] = re.sub(r"\{.*\}", "VERB ...", lines[0])
    return "".join(_folded(line, columns) for line in lines)


def _in_box(line: str) -> str:
    """Return what is shown of `line`, without the sides of a box."""
    return _COLOURS.sub("", line).strip(" │|\n")


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
