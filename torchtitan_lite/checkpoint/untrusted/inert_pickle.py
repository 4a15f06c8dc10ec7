"""Parse a pickle without unpickling it.

`parse_pickle` runs no code that a pickle names: it imports nothing, calls nothing and sets no attributes. A class
or function becomes a `PickledName` if the caller's table has exactly that module and name; otherwise the pickle is
refused. A call, or a new instance, becomes an inert `Instance` with its arguments and its state. So the
result is at most as large as the pickle, and the caller decides what it means. Operations that the
pickles of DCP and torch.save do not use are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
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
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, values, operations = self._data, _VALUES, _OPERATIONS
        while (code := data[self._at]) != _STOP:
            self._at += 1
            if (read := values.get(code)) is not None:
                value = read(self)
                self._stack.append(value)
            elif (operation := operations.get(code)) is not None:
                operation(self)
            else:
                raise InertPickleError(
                    f"operation {bytes([code])!r} at byte {self._at - 1} is one that no checkpoint needs"
                )
        [result] = self._stack
        return result

    def take(self, num_bytes: int) -> bytes:
        begin, self._at = self._at, self._at + num_bytes
        if self._at > len(self._data):
            raise InertPickleError(f"{num_bytes} bytes at byte {begin} reach beyond its end")
        return self._data[begin : self._at]

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def length(self) -> int:
        number: int = _LENGTH.unpack(self.take(4))[0]
        return number

    def line(self) -> str:
        end = self._data.index(b"\n", self._at)
        line, self._at = self._data[self._at : end], end + 1
        return line.decode()

    def short_text(self) -> str:
        at = self._at
        self._at = end = at + 1 + self._data[at]
        if end > len(self._data):
            raise InertPickleError(f"the string at byte {at} reaches beyond its end")
        return self._data[at + 1 : end].decode()

    def marked(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def last(self, count: int) -> tuple[Any, ...]:
        items = tuple(self._stack[-count:])
        if len(items) != count:
            raise InertPickleError(f"a tuple of {count} has only {len(items)} items")
        del self._stack[-count:]
        return items

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def memoize(self, number: int | None = None) -> None:
        self.memo[len(self.memo) if number is None else number] = self._stack[-1]

    def extend(self, items: Sequence[Any]) -> None:
        _appendable_list(self._stack[-1]).extend(items)

    def set_items(self, items: Sequence[Any]) -> None:
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

    def find(self, module: Any, name: Any) -> object:
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
_VALUES: dict[int, Callable[[_Machine], Any]] = {
    ord(code): read
    for code, read in {
        "N": lambda _: None,
        "\x88": lambda _: True,
        "\x89": lambda _: False,
        "}": lambda _: {},
        "]": lambda _: [],
        ")": lambda _: (),
        "K": _Machine.byte,
        "M": lambda machine: int.from_bytes(machine.take(2), "little"),
        "J": lambda machine: _INT.unpack(machine.take(4))[0],
        "\x8a": lambda machine: int.from_bytes(machine.take(machine.byte()), "little", signed=True),
        "G": lambda machine: _FLOAT.unpack(machine.take(8))[0],
        "\x8c": _Machine.short_text,
        "X": lambda machine: machine.take(machine.length()).decode(),
        "h": lambda machine: machine.memo[machine.byte()],
        "j": lambda machine: machine.memo[machine.length()],
        "t": lambda machine: tuple(machine.marked()),
        "\x85": lambda machine: machine.last(1),
        "\x86": lambda machine: machine.last(2),
        "\x87": lambda machine: machine.last(3),
        "c": lambda machine: machine.find(machine.line(), machine.line()),
        "\x93": lambda machine: machine.find(*machine.last(2)),
    }.items()
}
"""The operations that push one value, and what they push."""
_OPERATIONS: dict[int, Callable[[_Machine], object]] = {
    ord(code): operation
    for code, operation in {
        "\x80": lambda machine: machine.take(1),
        "\x95": lambda machine: machine.take(8),
        "(": _Machine.mark,
        "\x94": _Machine.memoize,
        "q": lambda machine: machine.memoize(machine.byte()),
        "r": lambda machine: machine.memoize(machine.length()),
        "a": lambda machine: machine.extend(machine.last(1)),
        "e": lambda machine: machine.extend(machine.marked()),
        "s": lambda machine: machine.set_items(machine.last(2)),
        "u": lambda machine: machine.set_items(machine.marked()),
        "R": _Machine.call,
        "\x81": _Machine.call,
        "b": _Machine.build,
        "Q": _Machine.persistent,
    }.items()
}
