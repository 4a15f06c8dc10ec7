"""What a value must be, in a TOML file and on the command line.

A `Kind` is read once from a field's annotation. TOML has kinds of its own, and they must fit: a
string is not a number, a number is not a switch. On the command line everything is text. Both become
the text that tyro parses, so that there is one way from text to value.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from torchtitan_lite.errors import ConfigError

_EXPECTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    tuple: "a list of strings",
    object: "a value",
}
_TOML_TYPES: dict[type, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (float, int),
    str: (str,),
    tuple: (list,),
}


@dataclass(frozen=True)
class Kind:
    """`base` is bool, int, float, str or tuple (of strings); object takes anything."""

    base: type
    optional: bool = False
    choices: tuple[str, ...] = ()

    @classmethod
    def of(cls, annotation: Any) -> Kind:
        """The kind of a field with this (resolved) annotation."""
        if get_origin(annotation) in (Union, types.UnionType):
            (inner,) = [arm for arm in get_args(annotation) if arm is not type(None)]
            return dataclasses.replace(cls.of(inner), optional=True)
        if get_origin(annotation) is Literal:
            return cls(str, choices=get_args(annotation))
        return cls(get_origin(annotation) or annotation)

    def describe(self) -> str:
        """What is expected, in words."""
        return f"one of {', '.join(self.choices)}" if self.choices else _EXPECTED[self.base]

    def text_of(self, value: object, where: str) -> str:
        """The text of a TOML value; ConfigError where its own kind does not fit."""
        fits = self.base is object or type(value) in _TOML_TYPES[self.base]
        if self.base is tuple and isinstance(value, list):
            fits = all(isinstance(element, str) for element in value)
        if not fits:
            raise ConfigError(f"{where}: expected {self.describe()}, found {in_words(value, self.base)}.")
        return to_text(value)

    def text_of_words(self, words: Sequence[str], where: str) -> str:
        """The text of the words after a name on the command line; ConfigError where there are too many or too few."""
        if not words and self.base in (bool, object):
            return "true"
        if self.base in (tuple, object):
            return join(words)
        if not words:
            raise ConfigError(f"{where}: expected {self.describe()}, found nothing. Write {where}=VALUE.")
        if len(words) > 1:
            raise ConfigError(f"{where}: expected one value, found {' '.join(words)!r}. Quote what has spaces.")
        return words[0]

    def checked(self, text: str, key: str, where: str) -> str:
        """The text as tyro takes it, a choice in its own spelling; ConfigError where it is not of this kind."""
        if self.choices:
            return self._choice(text, key, where)
        if not (self.optional and text == "None") and not _is(self.base, text):
            raise ConfigError(f"{where}: expected {self.describe()}, found {text!r}.")
        return text.lower() if self.base is bool else text

    def _choice(self, text: str, key: str, where: str) -> str:
        spellings = {choice.lower(): choice for choice in self.choices}
        if text.lower() in spellings:
            return spellings[text.lower()]
        nearest = (*difflib.get_close_matches(text.lower(), spellings, n=1), self.choices[0])[0]
        mend = f"Set --{key}={spellings.get(nearest, nearest)}"
        raise ConfigError(f"{where}: expected {self.describe()}, found {text!r}. {mend}.")


def split(text: str) -> tuple[str, ...]:
    """The names in a list that is separated by commas, spaces or both."""
    return tuple(name for name in re.split(r"[,\s]+", text) if name)


def join(texts: Iterable[str]) -> str:
    """The one text that `split` takes apart into the names of all `texts`."""
    return ",".join(name for text in texts for name in split(text))


def to_text(value: object) -> str:
    """A plain value as one writes it on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return join(map(str, value))
    return str(value)


def in_words(value: object, expected: type) -> str:
    """`value` as an error names it, with a hint where only quotes are wrong."""
    if isinstance(value, str):
        hint = " (write it without quotes)" if expected is not tuple and _is(expected, value) else ""
        return f"the string {value!r}{hint}"
    if type(value) in (int, float):
        return f"the number {value}" + (" (write it in quotes)" if expected is str else "")
    return to_text(value) if isinstance(value, bool) else repr(value)


def _is(base: type, text: str) -> bool:
    if base is bool:
        return text.lower() in ("true", "false")
    if base in (int, float):
        try:
            base(text)
        except ValueError:
            return False
    return True
