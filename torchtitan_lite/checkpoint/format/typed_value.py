"""Values of the standard library and of NumPy that a state may hold besides plain ones, as a tag and plain parts.

A deque keeps its `maxlen`, an array its dtype and shape, a time its zone and its fold. A checkpoint names none of
their classes: a tag is looked up here, and what it makes depends on its parts alone. Without torch; NumPy is imported
only where there is an array.
"""

from __future__ import annotations

import math
import re
import sys
from collections import deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

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


def tag_and_parts(value: object) -> tuple[str, list[Any]] | None:
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


def made_of_parts(tag: str, parts: Any) -> Any:
    """Return the value of this tag and these parts, which may be any plain values. Raise ValueError if it has none."""
    if type(parts) is not list or not parts:
        raise ValueError(f"{tag}: expected a list of parts, found a {type(parts).__name__}")
    try:
        return _MAKERS[tag](*parts)
    except (TypeError, OverflowError, KeyError, ValueError) as error:
        raise ValueError(f"{tag}: {error}") from None


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
    import numpy

    if kind not in ("array", "number") or (shape and kind == "number"):
        raise ValueError(f"expected an array or a number, found {kind!r:.20} of {len(shape)} dimensions")
    if not _DTYPE.fullmatch(dtype) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"expected a dtype of numbers and a shape, found {dtype!r:.20} and {shape!r:.40}")
    spec = numpy.dtype(dtype)
    if math.prod(shape) * spec.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes are no array of {dtype} {shape!r:.40}")
    array = numpy.frombuffer(bytearray(data), spec) if data else numpy.zeros(shape, spec)
    array = array.reshape(shape).copy()
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


def _made_path(name: str, text: str) -> PurePath:
    return _PATHS[name](text)


_MAKERS: dict[str, Callable[..., Any]] = {
    "$deque": _made_deque,
    "$path": _made_path,
    "$time": _made_time,
    "$numpy": _made_array,
}
TAGS = frozenset(_MAKERS)
