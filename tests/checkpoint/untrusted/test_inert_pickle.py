"""Pickles are parsed without running them: plain values are what `pickle` loads, calls become inert records."""

from __future__ import annotations

import collections
import pickle
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_lite.checkpoint.untrusted.inert_pickle import (
    InertPickleError,
    Instance,
    Persistent,
    PickledName,
    parse_pickle,
)

POINT = PickledName("Point")
TABLE: dict[tuple[str, str], object] = {("shapes", "Point"): POINT, ("shapes", "ORIGIN"): "the origin"}

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text()
    | st.text(min_size=250, max_size=260),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.booleans() | st.none(), inner)
    ),
    max_leaves=15,
)


def typed(value: Any) -> Any:
    """Return `value` with the type of every part, which == does not compare."""
    if isinstance(value, dict):
        return {(type(key), key): typed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [typed(item) for item in value]
    return type(value), value


@settings(max_examples=150)
@given(plain, st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_what_pickle_loads(value: Any, protocol: int) -> None:
    assert typed(parse_pickle(pickle.dumps(value, protocol), {})) == typed(value)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_repeated_values_are_found_in_the_memo_however_many_there_are(protocol: int) -> None:
    names = [f"name {number}" for number in range(300)]
    value = [*names, *names, tuple(names[:1]), tuple(names[:2]), tuple(names[:3]), tuple(names[:4]), names]
    assert parse_pickle(pickle.dumps(value, protocol), {}) == value


@pytest.mark.slow
@settings(max_examples=100)
@given(plain, st.integers(2, pickle.HIGHEST_PROTOCOL), st.data())
def test_a_pickle_that_is_cut_is_refused(value: Any, protocol: int, data: st.DataObject) -> None:
    whole = pickle.dumps(value, protocol)
    with pytest.raises(InertPickleError):
        parse_pickle(whole[: data.draw(st.integers(0, len(whole) - 1))], {})


@pytest.mark.parametrize(
    ("pickled", "found"),
    [
        (b"\x80\x04X\xff\x00\x00\x00ab.", "255 bytes at byte 7 reach beyond its end"),
        (b"\x80\x04\x8c\xffab.", "the string at byte 3 reaches beyond its end"),
        (b"\x80\x04\x95\x00.", "8 bytes at byte 3 reach beyond its end"),
        (b"\x80\x04.", "it is not a complete pickle"),
        (b"\x80\x04NN.", "it is not a complete pickle"),
        (b"\x80\x04N\x86.", "a tuple of 2 has only 1 items"),
        (b"\x80\x04NN\x87.", "a tuple of 3 has only 2 items"),
        (b"\x80\x04h\x05.", "it is not a complete pickle"),
        (b"\x80\x04NNa.", "it appends items to a NoneType"),
        (b"\x80\x04N(Ne.", "it appends items to a NoneType"),
        (b"\x80\x04]NNs.", "it sets items in a list"),
        (b"\x80\x04}(NNNu.", "the key of a mapping has a type that no checkpoint needs"),
        (b"\x80\x04}]Ns.", "the key of a mapping has a type that no checkpoint needs"),
        (b"\x80\x04NNR.", "it calls a NoneType"),
        (b"\x80\x04cshapes\nPoint\nNR.", "it calls Point with a NoneType, not with arguments"),
        (b"\x80\x04cshapes\nORIGIN\n)R.", "it calls a str"),
        (b"\x80\x04cshapes\nPoint\nNb.", "it sets attributes of a PickledName"),
        (b"\x80\x04cshapes\nPoint\n)RNb]b]b.", "it sets attributes of a Instance"),
        (b"\x80\x04cos\nsystem\n.", "it asks for os.system, which no checkpoint needs"),
        (b"\x80\x04\x8c\x02osN\x93.", "the name of a class is not a string"),
        (b"\x80\x04N\x8c\x02os\x93.", "the name of a class is not a string"),
        (b"\x80\x04i", r"operation b'i' at byte 2 is one that no checkpoint needs"),
    ],
)
def test_a_pickle_that_no_checkpoint_has_is_refused_with_the_reason(pickled: bytes, found: str) -> None:
    with pytest.raises(InertPickleError, match=found):
        parse_pickle(pickled, TABLE)


def test_every_length_of_a_number_is_read() -> None:
    for number in (0, 1, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -1, -(2**31), -(2**31) - 1, 2**200, -(2**200)):
        assert parse_pickle(pickle.dumps(number, 2), {}) == number
    assert parse_pickle(b"\x80\x02\x8a\x00.", {}) == 0
    assert parse_pickle(b"\x80\x02G" + struct.pack(">d", 0.1) + b".", {}) == 0.1


def test_a_call_becomes_an_instance_with_its_arguments_items_and_state() -> None:
    calls: list[tuple[PickledName, tuple[Any, ...]]] = []
    pickled = b"\x80\x04cshapes\nPoint\nK\x03\x85R(K\x01K\x02e(K\x04K\x05u}b."
    point = parse_pickle(pickled, TABLE, lambda kind, args: calls.append((kind, args)))
    assert type(point) is Instance
    assert (point.kind, point.args, point.items, point.members, point.state) == (POINT, (3,), [1, 2], {4: 5}, {})
    assert calls == [(POINT, (3,))]


def test_a_call_that_the_judge_refuses_is_an_error() -> None:
    def refuse(kind: PickledName, args: tuple[Any, ...]) -> None:
        raise InertPickleError(f"{kind.name} of {args}")

    with pytest.raises(InertPickleError, match=r"Point of \(3,\)"):
        parse_pickle(b"\x80\x04\x8c\x06shapes\x8c\x05Point\x93K\x03\x85\x81.", TABLE, refuse)


def test_an_instance_of_a_real_class_is_parsed_to_its_members() -> None:
    table = {("collections", "OrderedDict"): PickledName("OrderedDict")}
    read = parse_pickle(pickle.dumps(collections.OrderedDict(a=1), 2), table)
    assert (read.kind.name, read.args, read.members) == ("OrderedDict", (), {"a": 1})


def test_a_persistent_id_is_returned() -> None:
    read = parse_pickle(b"\x80\x02\x8c\x03key\x85Q.", {})
    assert type(read) is Persistent
    assert read.id == ("key",)


@pytest.mark.parametrize(
    ("key", "is_accepted"),
    [
        *(((), True), ((1, "a", (None, 2.5)), True), (tuple(range(999)), True), (tuple(range(1000)), False)),
        *(((1, (2, (3, b"bytes"))), False), (((),) * 999, True), ((((),) * 2,) * 500, False)),
    ],
    ids=lambda key: repr(key)[:30],
)
def test_a_tuple_is_a_key_if_it_is_small_and_of_plain_parts(key: tuple[Any, ...], is_accepted: bool) -> None:
    pickled = pickle.dumps({key: 1}, 2)
    if is_accepted:
        assert parse_pickle(pickled, {}) == {key: 1}
    else:
        with pytest.raises(InertPickleError):
            parse_pickle(pickled, {})
