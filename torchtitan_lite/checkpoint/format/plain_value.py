"""Small objects as JSON, and back.

`decode(encode(value))` equals `value` with the same types at every depth: numbers to the last bit, tuples as tuples,
keys that are not strings. What JSON cannot express is an object with one member whose name begins with "$": `$tuple`,
a list; `$dict`, pairs; `$int`, of more than 64 bits, in hexadecimal digits; `$float`, not finite, a big-endian double
in hexadecimal digits; `$bytes`, base64; `$text`, with half of a surrogate pair, its UTF-8 in base64. Typed values, of
the standard library and of NumPy, are lists of plain parts: `$deque` with its `maxlen`, `$numpy` with dtype and shape,
`$time` with zone and fold, `$path`. Any other type, a subclass of a plain one included, raises `NotPlain`. Decoding
runs no code and makes nothing but these types, of any document. Without torch; NumPy is imported only where there is an
array.
"""

from __future__ import annotations

import base64
import math
import re
import struct
import sys
from collections import deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from importlib import import_module
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

MAX_DEPTH = 100
"""Nesting of containers; the limit of Python's JSON parser is not far above."""

MAX_PARTS = 1_000_000
"""Values within one value. A few lists that each hold another one twice would fill any memory."""

_INT64 = 1 << 63


class NotPlain(ValueError):
    """The value, or something in it, is not of a plain type."""


class Encoded(NamedTuple):
    """A value in the form that JSON can hold."""

    document: Any
    is_typed: bool
    """Whether a typed value is in it: torch.load(weights_only=True) refuses that, and takes the document."""


def encoded(value: object) -> Encoded:
    """Return `value` (None, bool, int, float, str, bytes, list, tuple, dict, typed ones) encoded. Raise `NotPlain`."""
    encoder = _Encoder()
    return Encoded(encoder.encode(value, 0), encoder.is_typed)


def encode_value(value: object) -> Any:
    """Return the document of `value` alone. Raise `NotPlain`."""
    return encoded(value).document


class _Encoder:
    def __init__(self) -> None:
        self._parts = 0
        self.is_typed = False

    def encode(self, value: object, depth: int) -> Any:
        self._parts += 1
        if depth > MAX_DEPTH or self._parts > MAX_PARTS:
            raise NotPlain("the value is nested too deeply, contains itself, or is too large")
        kind = type(value)
        if value is None or kind is bool:
            return value
        make = _ENCODERS.get(kind)
        if make is not None:
            return make(self, value, depth + 1)
        if (typed := _tag_and_parts(value)) is None:
            raise NotPlain(f"a {kind.__module__}.{kind.__qualname__} is not a plain value")
        self.is_typed = True
        tag, parts = typed
        return {tag: self.encode(parts, depth + 1)}

    def number(self, value: int, _: int) -> Any:
        # Python refuses to parse decimal numbers of thousands of digits, but parses hexadecimal ones.
        return value if -_INT64 <= value < _INT64 else {"$int": f"{value:x}"}

    def real(self, value: float, _: int) -> Any:
        is_finite = value - value == 0
        return value if is_finite else {"$float": struct.pack(">d", value).hex()}

    def text(self, value: str, _: int) -> Any:
        # JSON would join two halves of a surrogate pair to one character.
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            return {"$text": _to_base64(value.encode("utf-8", "surrogatepass"))}
        return value

    def binary(self, value: bytes, _: int) -> Any:
        return {"$bytes": _to_base64(value)}

    def sequence(self, value: list[Any], depth: int) -> Any:
        return [self.encode(item, depth) for item in value]

    def tuple(self, value: tuple[Any, ...], depth: int) -> Any:
        return {"$tuple": [self.encode(item, depth) for item in value]}

    def mapping(self, value: dict[Any, Any], depth: int) -> Any:
        if all(type(key) is str and self.text(key, 0) is key and not key.startswith("$") for key in value):
            return {key: self.encode(item, depth) for key, item in value.items()}
        return {"$dict": [[self.encode(key, depth), self.encode(item, depth)] for key, item in value.items()]}


_ENCODERS: dict[type, Callable[[_Encoder, Any, int], Any]] = {
    int: _Encoder.number,
    float: _Encoder.real,
    str: _Encoder.text,
    bytes: _Encoder.binary,
    list: _Encoder.sequence,
    tuple: _Encoder.tuple,
    dict: _Encoder.mapping,
}


def decode_value(document: object, depth: int = 0) -> Any:
    """Return the value that `encode_value` turned into `document`. Raise ValueError for any other document."""
    if depth > MAX_DEPTH + 1:
        raise ValueError("the value is nested too deeply")
    if document is None or isinstance(document, bool | int | float | str):
        return document
    if isinstance(document, list):
        return [decode_value(item, depth + 1) for item in document]
    if not isinstance(document, dict):
        raise ValueError(f"a {type(document).__name__} is not a JSON value")
    if len(document) == 1:
        [(name, content)] = document.items()
        if name.startswith("$"):
            return _tagged(name, content, depth + 1)
    if any(name.startswith("$") for name in document):
        raise ValueError("expected a name that begins with $ alone, found others next to it")
    return {name: decode_value(item, depth + 1) for name, item in document.items()}


def _tagged(name: str, content: object, depth: int) -> Any:
    if name == "$tuple" and isinstance(content, list):
        return tuple(decode_value(item, depth) for item in content)
    if name == "$dict" and isinstance(content, list):
        return _decoded_pairs(content, depth)
    make = _MAKERS.get(name)
    if make is None or type(content) is not (str if name in _OF_TEXT else list):
        raise ValueError(f"{name[:20]!r} with a {type(content).__name__} is not a known tag")
    parts = [content] if name in _OF_TEXT else decode_value(content, depth)
    try:
        return make(*parts)
    except (TypeError, OverflowError, KeyError, ValueError, struct.error) as error:
        raise ValueError(f"{name}: {error}") from None


def _decoded_pairs(content: list[Any], depth: int) -> dict[Any, Any]:
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in content):
        raise ValueError("$dict: expected pairs of a key and a value")
    try:
        return {decode_value(key, depth): decode_value(item, depth) for key, item in content}
    except TypeError as error:
        raise ValueError(f"$dict: {error}") from None


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_ZONED = ("hour", "minute", "second", "microsecond", "tzinfo", "fold")
_FIELDS: dict[type, tuple[str, ...]] = {
    date: ("year", "month", "day"),
    time: _ZONED,
    datetime: ("year", "month", "day", *_ZONED),
    timedelta: ("days", "seconds", "microseconds"),
}
"""The fields of each type of datetime, by which it is made again; of a timezone they are its own arguments."""
_TIMES: dict[str, type] = {kind.__name__: kind for kind in (*_FIELDS, timezone)}
_PATHS: dict[str, type[PurePath]] = {kind.__name__: kind for kind in (Path, PurePosixPath, PureWindowsPath)}
"""A path of this system is a `Path`: on another system it is one of that."""
_DTYPE = re.compile(r"[<>|][biufcSU]\d{1,9}")
"""Numbers, booleans, and bytes and text of a fixed width, as NumPy spells them."""


def _tag_and_parts(value: object) -> tuple[str, list[Any]] | None:
    """Return the tag of `value`, and the values that make it again; None if it is of none of these types."""
    kind = type(value)
    if isinstance(value, deque):
        return ("$deque", [[*value], value.maxlen]) if kind is deque else None
    if isinstance(value, PurePath):
        name = "Path" if kind is type(Path()) else kind.__name__
        return ("$path", [name, str(value)]) if name == "Path" or _PATHS.get(name) is kind else None
    if isinstance(value, timezone):
        return "$time", ["timezone", *value.__getinitargs__()]  # type: ignore[attr-defined]  # pickle uses it, too
    if kind in _FIELDS:
        return "$time", [kind.__name__, *(getattr(value, name) for name in _FIELDS[kind])]
    return _of_numpy(value)


def _of_numpy(value: Any) -> tuple[str, list[Any]] | None:
    if (numpy := sys.modules.get("numpy")) is None:
        return None  # Then there is no value of it.
    is_array = type(value) is numpy.ndarray
    if not is_array and not (isinstance(value, numpy.generic) and type(value) is value.dtype.type):
        return None
    array = numpy.asarray(value)
    if not _DTYPE.fullmatch(array.dtype.str):
        return None
    if not is_array and array.dtype.kind in "SU" and array[()] != value:
        return None  # A number of NUL at its end is lost in an array.
    return "$numpy", ["array" if is_array else "number", array.dtype.str, [*array.shape], array.tobytes()]


def _made_array(kind: str, dtype: str, shape: list[int], data: bytes) -> Any:
    numpy = import_module("numpy")  # Takes its time, and listing checkpoints needs no array.
    is_kind = kind == "array" or (kind == "number" and not shape)
    if not is_kind or not _DTYPE.fullmatch(dtype) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"expected numbers and their shape, found {kind!r:.20} of {dtype!r:.20} and {shape!r:.40}")
    spec = numpy.dtype(dtype)
    if math.prod(shape) * spec.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes are no array of {dtype} {shape!r:.40}")
    array = numpy.ndarray(shape, spec, data).copy()
    return array if kind == "array" else array[()]


def _made_deque(items: list[Any], maxlen: int | None) -> deque[Any]:
    if type(items) is not list or (maxlen is not None and (type(maxlen) is not int or len(items) > maxlen)):
        raise ValueError(f"expected a list and its most items, found a {type(items).__name__} and {maxlen!r:.20}")
    return deque(items, maxlen)


def _made_time(name: str, *fields: Any) -> Any:
    kind = _TIMES[name]
    if kind is timezone:
        return timezone(*fields)
    given = dict(zip(_FIELDS[kind], fields, strict=True))
    return kind(**given)


_OF_TEXT = frozenset({"$int", "$float", "$text", "$bytes"})
_MAKERS: dict[str, Callable[..., Any]] = {
    "$int": lambda text: int(text, 16),
    "$float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "$text": lambda text: _from_base64(text).decode("utf-8", "surrogatepass"),
    "$bytes": _from_base64,
    "$deque": _made_deque,
    "$path": lambda name, text: _PATHS[name](text),
    "$time": _made_time,
    "$numpy": _made_array,
}
"""What makes the value of each tag but `$tuple` and `$dict` of its text, or of its parts, which may be any values."""
