"""argparse's parser, made from dataclasses: names and kinds from the fields, help from the doc strings under them.

Wrong usage is a ConfigError with one sentence. A help is as wide as the terminal, and coloured on one.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import shutil
import sys
import textwrap
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NoReturn, get_type_hints

from torchtitan_lite.config.value_kinds import ValueKind
from torchtitan_lite.errors import ConfigError

Hint = Callable[[object], str]
"""From the default of an option to what its help ends in, as "(default: 3)"; the empty string for nothing."""


@dataclasses.dataclass(frozen=True)
class Option:
    """In the annotation of a field: what the help calls the value of the option."""

    metavar: str


@dataclasses.dataclass(frozen=True)
class Positional:
    """In the annotation of a field: an argument without an option's name, and what the help calls it."""

    metavar: str


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse prints a report and exits. The help of an option begins in column `column`."""

    def __init__(self, *, column: int = 24, **options: Any) -> None:
        width = shutil.get_terminal_size().columns
        form: Any = partial(_Formatter, max_help_position=column, width=width)
        super().__init__(allow_abbrev=False, formatter_class=form, **options)
        self.color = False  # From Python 3.14 on it has colours of its own.
        self.known = ["-h", "--help"]
        """The options, in their order."""
        self.places: list[str] = []
        """The other arguments, as the usage has them."""

    def add_fields(self, group: Any, cls: type, hint: Hint, *, section: str = "") -> None:
        """Add an argument for each field of `cls` to `group`, which is this parser or a group in it."""
        docs, types = doc_strings(cls), get_type_hints(cls, include_extras=True)
        for field in dataclasses.fields(cls):
            noted = getattr(types[field.name], "__metadata__", ())
            place = next((each for each in noted if isinstance(each, Option | Positional)), None)
            kind = ValueKind.of(types[field.name])
            help_text = f"{docs[field.name]} {hint(field.default)}".strip().replace("%", "%%")
            option = f"--{section}.{field.name}" if section else f"--{field.name.replace('_', '-')}"
            options: dict[str, Any] = {
                "help": help_text,
                "default": field.default,
                "type": partial(_argument_value, kind),
            }
            if isinstance(place, Positional):
                required = field.default is dataclasses.MISSING
                self.places.append(place.metavar if required else f"[{place.metavar}]")
                group.add_argument(field.name, metavar=place.metavar, nargs=None if required else "?", **options)
                continue
            self.known.append(option)
            if kind.base is bool:
                group.add_argument(option, help=help_text, action="store_true")
            else:
                group.add_argument(option, metavar=place.metavar if place else kind.metavar, **options)

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ").replace("expected one argument", "expected a value, found none")
        raise ConfigError(text.replace("the following arguments are required", f"missing from {self.prog}"))

    def print_help(self, file: Any = None) -> None:
        from rich.console import Console
        from rich.text import Text

        if self.places:  # In place of one that lists all options, and does not fit a narrow terminal.
            usage = " ".join((self.prog, "[-h] [OPTIONS]", *self.places))
            columns = shutil.get_terminal_size().columns
            self.usage = textwrap.fill(usage, columns - len("usage: "), subsequent_indent=" " * len("usage: "))
        console, text = Console(file=file or sys.stdout), Text(self.format_help())
        if not console.no_color:  # With NO_COLOR it would still print bold text.
            text.highlight_regex(r"(?m)^\w[\w ]*:", "bold")
            text.highlight_regex(r"(?m)^ +--?[a-z][\w.-]*", "cyan")
        console.print(text, soft_wrap=True, end="")


class _Formatter(argparse.HelpFormatter):
    """Folds each paragraph of a description."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(_Formatter, self)._fill_text(each, width, indent) for each in text.split("\n\n"))


def _argument_value(kind: ValueKind, text: str) -> Any:
    if not kind.fits(text):
        raise argparse.ArgumentTypeError(f"expected {kind.describe()}, found {text!r}")
    return kind.value(text)


@cache
def doc_strings(cls: type) -> dict[str, str]:
    """Return the doc string under each field of a dataclass, on one line; fields without one are left out."""
    docs: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__bases__)):
        docs |= doc_strings(base)
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            text = ast.literal_eval(following.value)
            docs[ast.unparse(statement.target)] = " ".join(text.split())
    return docs
