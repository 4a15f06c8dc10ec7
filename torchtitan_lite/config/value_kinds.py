"""The kind of value that a key takes, in a TOML file and on the command line.

A `ValueKind` comes from a field's annotation. A TOML value has a type of its own, which must fit: a string is not a
number, and a number is not a switch. On the command line every value is text. Both become text, so there is one way
from text to value.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from torchtitan_lite.errors import ConfigError

_EXPECTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    tuple: "a list of strings",
    object: "a value",
}


@dataclass(frozen=True)
class ValueKind:
    """The type of a value. `base` is bool, int, float, str or tuple; object accepts anything."""

    base: type
    optional: bool = False
    choices: tuple[str, ...] = ()
    element: type = str
    """Of a tuple, what it holds: str or int."""
    word: str = ""
    """Of a number, the word that may stand in its place."""

    @classmethod
    def of(cls, annotation: Any) -> ValueKind:
        """Return the kind of a field with this (resolved) annotation."""
        if get_origin(annotation) is Annotated:
            return cls.of(get_args(annotation)[0])
        if get_origin(annotation) in (Union, types.UnionType):
            inner, *word = [arm for arm in get_args(annotation) if arm is not type(None)]
            if word:  # int | Literal["auto"]
                return dataclasses.replace(cls.of(inner), word=get_args(*word)[0])
            return dataclasses.replace(cls.of(inner), optional=True)
        if get_origin(annotation) is Literal:
            return cls(str, choices=get_args(annotation))
        if get_origin(annotation) is tuple:
            return cls(tuple, element=get_args(annotation)[0])
        return cls(annotation)

    def describe(self) -> str:
        """Return what is expected, in the words of an error."""
        if self.choices:
            return f"one of {', '.join(filter(None, self.choices))}"
        expected = "a list of whole numbers" if self.element is int else _EXPECTED[self.base]
        return f'{expected} or "{self.word}"' if self.word else expected

    def text_of(self, value: object, where: str) -> str:
        """Return the text of a TOML value. Raise ConfigError if its type does not fit."""
        is_text_of_choice = bool(self.choices) and isinstance(value, str)  # Of which one, `checked` says.
        if self.base is not object and self.converted(value) is None and not is_text_of_choice:
            raise ConfigError(f"{where}: expected {self.describe()}, found {value_text(value, self.base)}.")
        return command_line_text(value)

    def converted(self, value: Any) -> Any:
        """Return a value of Python or TOML as a field of the kind holds it; None if it is not of the kind."""
        if self.base is str and isinstance(value, os.PathLike):
            value = os.fspath(value)
        if self.choices:
            return self.spelled(value) if isinstance(value, str) else None
        if self.base is tuple:
            fits = isinstance(value, tuple | list) and all(map(self._is_element, value))
            return (value if isinstance(value, tuple) else tuple(value)) if fits else None
        expected = (int, float) if self.base is float else self.base
        is_of_kind = isinstance(value, expected) and (self.base is bool or not isinstance(value, bool))
        return value if is_of_kind or self.is_word(value) else None

    def is_word(self, value: object) -> bool:
        """Return whether `value` is the word that stands in place of a number."""
        return bool(self.word) and value == self.word

    def _is_element(self, value: object) -> bool:
        return isinstance(value, self.element) and not isinstance(value, bool)

    def text_of_words(self, words: Sequence[str], where: str) -> str:
        """Return the text of the words after a name on the command line. Raise ConfigError for too many or too few."""
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
        """Return the text, choices in their exact spelling. Raise ConfigError if it does not fit."""
        if self.choices:
            return self._choice(text, key, where)
        texts = split_names(text) if self.element is int else ()
        if not all(_is_text_of(self.element, element) for element in texts):
            raise ConfigError(f"{where}: expected {self.describe()}, found {text!r}.")
        if not (self.optional and text == "None") and not self.is_word(text) and not _is_text_of(self.base, text):
            raise ConfigError(f"{where}: expected {self.describe()}, found {text!r}.")
        return text.lower() if self.base is bool else text

    def fits(self, text: str) -> bool:
        """Return whether `text` is one of the choices, or of the kind."""
        return text in self.choices if self.choices else self.is_word(text) or _is_text_of(self.base, text)

    def value(self, text: str) -> Any:
        """Return the value of a checked text."""
        if self.optional and text == "None":
            return None
        if self.is_word(text):
            return text
        if self.base is tuple:
            return tuple(map(self.element, split_names(text)))
        return text == "true" if self.base is bool else self.base(text)

    @property
    def metavar(self) -> str:
        """What a help calls a value of the kind."""
        named = f"{{{','.join(self.choices)}}}" if self.choices else self.base.__name__.upper()
        named = {int: "1,2,...", str: "A,B,..."}[self.element] if self.base is tuple else named
        named = f"{named}|{self.word}" if self.word else named
        return f"{named}|None" if self.optional else named

    def spelled(self, text: str) -> str | None:
        """Return the choice that is `text` in its exact spelling; None if it is none of them."""
        return {choice.lower(): choice for choice in self.choices}.get(text.lower())

    def _choice(self, text: str, key: str, where: str) -> str:
        if (choice := self.spelled(text)) is not None:
            return choice
        nearest = difflib.get_close_matches(text.lower(), [choice.lower() for choice in self.choices], n=1)
        fix = f"Set --{key}={self.spelled(nearest[0])}" if nearest else f"Set --{key} to one of these"
        raise ConfigError(f"{where}: expected {self.describe()}, found {text!r}. {fix}.")


def split_names(text: str) -> tuple[str, ...]:
    """Return the names in `text`, which are separated by commas, spaces or both."""
    return tuple(name for name in re.split(r"[,\s]+", text) if name)


def join(texts: Iterable[str]) -> str:
    """Return one text with the names of all `texts`, separated by commas; the inverse of `split_names`."""
    return ",".join(name for text in texts for name in split_names(text))


def command_line_text(value: object) -> str:
    """Return a plain value as a user writes it on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return join(map(str, value))
    return str(value)


def value_text(value: object, expected: type) -> str:
    """Return `value` as an error names it, with a hint if only the quotes are wrong."""
    if isinstance(value, str):
        hint = " (write it without quotes)" if expected is not tuple and _is_text_of(expected, value) else ""
        return f"the string {value!r}{hint}"
    if type(value) in (int, float):
        return f"the number {value}" + (" (write it in quotes)" if expected is str else "")
    return command_line_text(value) if isinstance(value, bool) else repr(value)


def _is_text_of(base: type, text: str) -> bool:
    if base is bool:
        return text.lower() in ("true", "false")
    if base in (int, float):
        try:
            base(text)
        except ValueError:
            return False
    return True
