"""Parse a pickle without unpickling it.

`parse_pickle` runs no code that a pickle names: it imports nothing, calls nothing and sets no attributes. A class
or function becomes a `PickledName` if the caller's table has exactly that module and name; otherwise the pickle is
refused. A call, or a new instance, becomes an inert `Instance` with its arguments and its state. So the
result is at most as large as the pickle, and the caller decides what it means. Operations that the
pickles of DCP and torch.save do not use are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Table = Mapping[tuple[str, str], object]
"""(module, name) to its `PickledName`, or to the constant with that name."""

_INT = struct.Struct("<i")
_LENGTH = struct.Struct("<I")
_FLOAT = struct.Struct(">d")


class InertPickleError(ValueError):
    """The bytes are not a pickle of the expected kind."""


@dataclass(frozen=True)
class PickledName:
    """The name of a class or a function."""

    name: str
    only_of: frozenset[str] = frozenset()
    """If not empty, it may only be called with one of these kinds and a string: `getattr` for a member of an enum."""


class AnyName(dict[tuple[str, str], object]):
    """A table in which every name is a `PickledName`, called MODULE.NAME."""

    def __missing__(self, name: tuple[str, str]) -> PickledName:
        return PickledName(".".join(name))


class Instance:
    """An inert record of a call of `kind` with `args`, and of the `state`, `items` and `members` set afterwards."""

    __slots__ = ("args", "items", "kind", "members", "state")

    def __init__(self, kind: PickledName, args: tuple[Any, ...]) -> None:
        self.kind = kind
        self.args = args
        self.state: Any = None
        self.items: list[Any] | None = None
        self.members: dict[Any, Any] | None = None


class Persistent:
    """A reference to something outside the pickle, by the persistent `id`."""

    __slots__ = ("id",)

    def __init__(self, id: Any) -> None:
        self.id = id


Judge = Callable[[PickledName, tuple[Any, ...]], None]
"""Raises `InertPickleError` for a call that the caller refuses."""


def parse_pickle(data: bytes, table: Table, judge: Judge = lambda kind, args: None) -> Any:
    """Return the value that the pickle `data` describes, made of JSON's types, tuples, `Instance`s and `PickledName`s.

    The constants of `table` occur in it, too. Runs nothing. Raises `InertPickleError`, naming what was found.
    """
    try:
        return _Machine(data, table, judge).run()
    except InertPickleError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise InertPickleError(f"it is not a complete pickle ({type(error).__name__}: {error})") from None


class _Machine:
    def __init__(self, data: bytes, table: Table, judge: Judge) -> None:
        self._data = data
        self._table = table
        self._judge = judge
        self._at = 0
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, operations = self._data, _OPERATIONS
        while (code := data[self._at]) != _STOP:
            self._at += 1
            operation = operations.get(code)
            if operation is None:
                raise InertPickleError(
                    f"operation {bytes([code])!r} at byte {self._at - 1} is one that no checkpoint needs"
                )
            operation(self)
        [result] = self._stack
        return result

    def _take(self, num_bytes: int) -> bytes:
        begin, self._at = self._at, self._at + num_bytes
        if self._at > len(self._data):
            raise InertPickleError(f"{num_bytes} bytes at byte {begin} reach beyond its end")
        return self._data[begin : self._at]

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        line, self._at = self._data[self._at : end], end + 1
        return line.decode()

    def _marked(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def protocol(self) -> None:
        self._take(1)

    def frame(self) -> None:
        self._take(8)

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def put(self) -> None:
        self._memo[self._data[self._at]] = self._stack[-1]
        self._at += 1

    def long_put(self) -> None:
        self._memo[_LENGTH.unpack(self._take(4))[0]] = self._stack[-1]

    def get(self) -> None:
        self._stack.append(self._memo[self._data[self._at]])
        self._at += 1

    def long_get(self) -> None:
        self._stack.append(self._memo[_LENGTH.unpack_from(self._data, self._at)[0]])
        self._at += 4

    def short_text(self) -> None:
        at = self._at
        self._at = end = at + 1 + self._data[at]
        if end > len(self._data):
            raise InertPickleError(f"the string at byte {at} reaches beyond its end")
        self._stack.append(self._data[at + 1 : end].decode())

    def text(self) -> None:
        self._stack.append(self._take(_LENGTH.unpack(self._take(4))[0]).decode())

    def int1(self) -> None:
        self._stack.append(self._data[self._at])
        self._at += 1

    def int2(self) -> None:
        self._stack.append(int.from_bytes(self._take(2), "little"))

    def int4(self) -> None:
        self._stack.append(_INT.unpack(self._take(4))[0])

    def long1(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._take(1)[0]), "little", signed=True))

    def float(self) -> None:
        self._stack.append(_FLOAT.unpack(self._take(8))[0])

    def none(self) -> None:
        self._stack.append(None)

    def true(self) -> None:
        self._stack.append(True)

    def false(self) -> None:
        self._stack.append(False)

    def empty_dict(self) -> None:
        self._stack.append({})

    def empty_list(self) -> None:
        self._stack.append([])

    def empty_tuple(self) -> None:
        self._stack.append(())

    def tuple1(self) -> None:
        self._stack[-1:] = [(self._stack[-1],)]

    def tuple2(self) -> None:
        self._last(2)

    def tuple3(self) -> None:
        self._last(3)

    def _last(self, count: int) -> None:
        items = tuple(self._stack[-count:])
        if len(items) != count:
            raise InertPickleError(f"a tuple of {count} has only {len(items)} items")
        self._stack[-count:] = [items]

    def tuple(self) -> None:
        items = tuple(self._marked())
        self._stack.append(items)

    def append(self) -> None:
        item = self._stack.pop()
        _appendable_list(self._stack[-1]).append(item)

    def appends(self) -> None:
        items = self._marked()
        _appendable_list(self._stack[-1]).extend(items)

    def set_item(self) -> None:
        key, value = self._stack[-2:]
        del self._stack[-2:]
        self._set([key, value])

    def set_items(self) -> None:
        self._set(self._marked())

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if len(items) % 2 or not all(type(key) in _KEYS or _is_small_tuple(key) for key in items[::2]):
            raise InertPickleError("the key of a mapping has a type that no checkpoint needs")
        pairs = zip(items[::2], items[1::2], strict=True)
        if type(target) is Instance:
            if target.members is None:
                target.members = {}
            target = target.members
        if type(target) is not dict:
            raise InertPickleError(f"it sets items in a {type(target).__name__}")
        target.update(pairs)

    def named(self) -> None:
        module = self._line()
        self._stack.append(self._find(module, self._line()))

    def stack_named(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._stack.append(self._find(module, name))

    def _find(self, module: Any, name: Any) -> object:
        if type(module) is not str or type(name) is not str:
            raise InertPickleError("the name of a class is not a string")
        try:
            return self._table[module, name]
        except KeyError:
            raise InertPickleError(f"it asks for {module}.{name}, which no checkpoint needs") from None

    def call(self) -> None:
        args = self._stack.pop()
        kind = self._stack[-1]
        if type(kind) is not PickledName:
            raise InertPickleError(f"it calls a {type(kind).__name__}")
        if type(args) is not tuple:
            raise InertPickleError(f"it calls {kind.name} with a {type(args).__name__}, not with arguments")
        if kind.only_of and not _is_member(kind, args):
            raise InertPickleError(f"it asks for {kind.name}, which no checkpoint needs")
        self._judge(kind, args)
        self._stack[-1] = Instance(kind, args)

    def build(self) -> None:
        state = self._stack.pop()
        instance = self._stack[-1]
        if type(instance) is not Instance or instance.state is not None:
            raise InertPickleError(f"it sets attributes of a {type(instance).__name__}")
        instance.state = state

    def persistent(self) -> None:
        self._stack[-1] = Persistent(self._stack[-1])


def _is_member(kind: PickledName, args: tuple[Any, ...]) -> bool:
    """Return whether `args` are one of the kinds in `kind.only_of` and a string."""
    return len(args) == 2 and type(args[0]) is PickledName and args[0].name in kind.only_of and type(args[1]) is str


def _is_small_tuple(key: Any) -> bool:
    """Return whether `key` is a hashable tuple with at most `_MAX_KEY_PARTS` parts, counted at every level.

    The limit bounds the time: Python hashes a nested tuple part by part.
    """
    waiting = [key] if type(key) is tuple else []
    visited = 0
    for part in waiting:
        visited += 1
        if visited > _MAX_KEY_PARTS or (type(part) is not tuple and type(part) not in _KEYS):
            return False
        if type(part) is tuple:
            waiting += part[:_MAX_KEY_PARTS]
    return visited > 0


def _appendable_list(value: Any) -> list[Any]:
    if type(value) is Instance:
        if value.items is None:
            value.items = []
        return value.items
    if type(value) is not list:
        raise InertPickleError(f"it appends items to a {type(value).__name__}")
    return value


_KEYS: tuple[type, ...] = (str, int, bool, float, type(None), Instance)
_MAX_KEY_PARTS = 1000
_STOP = ord(".")
_OPERATIONS: dict[int, Callable[[_Machine], None]] = {
    ord(code): operation
    for code, operation in {
        "\x80": _Machine.protocol,
        "\x95": _Machine.frame,
        "(": _Machine.mark,
        "\x94": _Machine.memoize,
        "q": _Machine.put,
        "r": _Machine.long_put,
        "h": _Machine.get,
        "j": _Machine.long_get,
        "\x8c": _Machine.short_text,
        "X": _Machine.text,
        "K": _Machine.int1,
        "M": _Machine.int2,
        "J": _Machine.int4,
        "\x8a": _Machine.long1,
        "G": _Machine.float,
        "N": _Machine.none,
        "\x88": _Machine.true,
        "\x89": _Machine.false,
        "}": _Machine.empty_dict,
        "]": _Machine.empty_list,
        ")": _Machine.empty_tuple,
        "\x85": _Machine.tuple1,
        "\x86": _Machine.tuple2,
        "\x87": _Machine.tuple3,
        "t": _Machine.tuple,
        "a": _Machine.append,
        "e": _Machine.appends,
        "s": _Machine.set_item,
        "u": _Machine.set_items,
        "c": _Machine.named,
        "\x93": _Machine.stack_named,
        "R": _Machine.call,
        "\x81": _Machine.call,
        "b": _Machine.build,
        "Q": _Machine.persistent,
    }.items()
}
