"""Small objects as JSON, and back."""

from __future__ import annotations

import collections
import enum
import json
import struct
from collections import deque
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies

from torchtitan_lite.checkpoint.format.plain_value import MAX_DEPTH, NotPlain, decode_value, encode_value

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=1 << 62, max_value=1 << 66)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
)
zones = (
    st.none()
    | st.timezones().map(lambda _: timezone.utc)
    | st.builds(timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23)), st.text(max_size=3))
)
dtypes = st.sampled_from(["?", "<i1", ">i2", "<u4", "<i8", "<f2", "<f4", ">f8", "<c8", "<c16", "S3", "<U2"])
shapes = numpy_strategies.array_shapes(min_dims=0, min_side=0)
arrays = dtypes.flatmap(lambda dtype: numpy_strategies.arrays(dtype, shapes))
paths = st.sampled_from([Path, PurePosixPath, PureWindowsPath])
typed = (
    arrays
    | arrays.filter(lambda array: array.size > 0 and array.dtype.kind != "S").map(lambda array: array.reshape(-1)[0])
    | st.dates()
    | st.times(timezones=zones)
    | st.datetimes(timezones=zones)
    | st.timedeltas()
    | st.builds(timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23)))
    | st.builds(lambda kind, text: kind(text), paths, st.text("abc/\\:", max_size=5))
)
keys = st.recursive(scalars, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=3)
values = st.recursive(
    scalars | typed,
    lambda inner: st.one_of(
        st.builds(deque, st.lists(inner, max_size=4), st.none() | st.integers(0, 5)),
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.sampled_from(["a", "$tuple", "$", "ä"]) | st.text(), inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=12,
)


def bits(value: Any) -> Any:
    """Return `value` with its types, and its floats as bytes, so that == compares exactly."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return type(value), array.dtype.str, array.shape, array.tobytes()
    if isinstance(value, deque):
        return deque, value.maxlen, [bits(item) for item in value]
    if isinstance(value, datetime | time):
        return type(value), repr(value), bits(value.tzinfo), value.fold
    if isinstance(value, timezone):
        return timezone, repr(value)
    if isinstance(value, float):
        return "float", struct.pack(">d", value)
    if isinstance(value, list | tuple):
        return type(value), [bits(item) for item in value]
    if isinstance(value, dict):
        return dict, [(bits(key), bits(item)) for key, item in value.items()]
    return type(value), value


@given(values)
@example({"$tuple": [1]})
@example({"$int": "5", "b": {"$": 1}})
@example({1: "int", "1": "str", (2, None): [True, 1, 1.0, -0.0]})
@example(10**5000)
@example("\ud800\udc00")
@example([float("nan"), float("inf"), -float("inf"), 5e-324])
@example([np.array("", "U0"), np.longdouble(1.25), np.str_("ä"), np.asfortranarray(np.ones((2, 3)))])
@example(deque([datetime(2020, 1, 1, fold=1), deque([np.bool_(True)], 1)], maxlen=2))
@example({date(2020, 1, 1): Path("a"), np.int64(3): "three"})
def test_a_value_is_decoded_to_the_same_value(value: Any) -> None:
    text = json.dumps(encode_value(value), allow_nan=False)
    assert bits(decode_value(json.loads(text))) == bits(value)


class Name(str):
    __slots__ = ()


class Choice(enum.IntEnum):
    ONE = 1


class Deque(deque[int]):
    pass


class Folder(PurePosixPath):
    pass


class Zone(tzinfo):
    def __init__(self, offset: timedelta) -> None:
        self.offset = offset


@pytest.mark.parametrize(
    "value",
    [
        *(torch.ones(1), torch.Size([1]), torch.float32, np.array([None]), np.zeros(1, [("a", "f4")]), np.dtype("f4")),
        *(np.datetime64("2020"), np.bytes_(b"a\0"), np.ma.array([1]), deque([object()]), Deque(), Folder("a")),
        *(datetime(2026, 1, 2, tzinfo=ZoneInfo("UTC")), Zone(timedelta(0))),
        *(collections.OrderedDict(a=1), collections.Counter(), {1}, frozenset([1]), bytearray(b"a"), 1j),
        *(Name("a"), Choice.ONE, object(), print),
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0],
)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: {"a": [v]}, lambda v: (1, (v,))])
def test_anything_else_is_not_plain(value: Any, wrap: Any) -> None:
    with pytest.raises(NotPlain):
        encode_value(wrap(value))


def test_a_key_that_is_not_plain_is_refused() -> None:
    with pytest.raises(NotPlain, match="Name"):
        encode_value({Name("a"): 1})


def test_a_value_nested_too_deeply_or_in_itself_is_not_plain() -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert decode_value(encode_value(deep)) == deep
    endless: list[Any] = []
    endless += [endless, endless]
    double: Any = 1
    for _ in range(50):
        double = [double, double]
    for value in [deep], endless, double:
        with pytest.raises(NotPlain):
            encode_value(value)


@pytest.mark.parametrize(
    "document",
    [
        {"$unknown": 1},
        {"$tuple": 1},
        {"$tuple": [], "b": 1},
        {"$dict": [[1]]},
        {"$dict": [[[1], 2]]},
        {"$dict": {"a": 1}},
        {"$int": 5},
        {"$int": ["ff"]},
        {"$text": ["YQ=="]},
        {"$deque": "ab"},
        {"$int": "x"},
        {"$float": "00"},
        {"$float": "zz"},
        {"$bytes": "!"},
        {"$text": "/w=="},
        {"$deque": 1},
        {"$deque": [[1], -1]},
        {"$deque": [[1, 2], 1]},
        {"$path": ["Path", 1]},
        {"$path": ["os", "x"]},
        {"$time": []},
        {"$time": ["datetime", 1]},
        {"$time": ["timezone", 1]},
        {"$time": ["timedelta", 10**30, 0, 0]},
        {"$numpy": ["array", "<f8", [10**15], {"$bytes": ""}]},
        {"$numpy": ["array", "|O8", [1], {"$bytes": "AAAAAAAAAAA="}]},
        {"$numpy": ["number", "<f8", [1], {"$bytes": "AAAAAAAAAAA="}]},
        {"$numpy": ["array", "<f7", [0], {"$bytes": ""}]},
        {"$numpy": ["array", "<f8", [-1], {"$bytes": ""}]},
        {"$numpy": ["array", "<U0", [10**30], {"$bytes": ""}]},
        {"$numpy": ["array", 1, [], ""]},
        {"a": {"$eval": "1"}},
        b"bytes",
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0],
)
def test_a_document_that_encodes_no_value_is_refused(document: Any) -> None:
    with pytest.raises(ValueError):
        decode_value(document)


def test_a_document_that_is_too_deep_is_refused() -> None:
    document: Any = 1
    for _ in range(900):
        document = [document]
    with pytest.raises(ValueError, match="deep"):
        decode_value(document)
