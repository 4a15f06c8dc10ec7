"""The attributes of an object as values: noted at one time, put back at another, also in another process.

What counts are all values that the object refers to, through its attributes, those of other objects, short containers
and closures, each once. Datasets, classes, modules of torch, and what the standard library needs for threads and files
are not looked into. An object, or an iterator, that was not there when `Attributes` was made has no place in another
process: `strangers` names it.
"""

from __future__ import annotations

import inspect
import operator
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CellType, ModuleType
from typing import Any

from torch import nn
from torch.utils.data import Sampler

from torchtitan_lite.data.generators import KINDS, Generators, global_objects
from torchtitan_lite.data.parts import MOST_ITEMS, Part, assign, parts_of
from torchtitan_lite.data.plain_values import Copy, NoValueError, copy_of, restored

_MOST_OBJECTS = 1000
_OF_THE_PROCESS = frozenset({"logging", "threading", "_thread", "multiprocessing", "concurrent", "asyncio", "_io"})
_CONTAINERS = (list, tuple, dict, deque, CellType)
_Others = dict[str, tuple[object, int]]
"""What is no value, by path, with the length of a container that is not looked into."""


@dataclass(frozen=True)
class Noted:
    """What one look at all attributes found."""

    values: dict[str, Copy]
    """By the path of the attribute: `.sampler.epoch`."""
    others: _Others
    generators: Generators
    """Those among the values, each once."""


class Attributes:
    """The attributes of `root`; `left_out` is an object that has a state of its own."""

    def __init__(self, root: object, left_out: object) -> None:
        self._root, self._left_out = root, left_out
        self._known: _Others | None = None
        self.made = self.note()
        """What was found when this was made."""
        self._known = self.made.others

    def note(self) -> Noted:
        """Return copies of all values, and what is none."""
        values: dict[str, Copy] = {}
        others: _Others = {}
        generators: Generators = {}
        for path, _, (_, _, value), copy in self._walk():
            if copy is not None:
                values[path] = copy
                if isinstance(value, KINDS) and all(value is not each for each in generators.values()):
                    generators[path] = value
            elif not isinstance(value, _CONTAINERS):
                others[path] = (value, 0)
            elif not isinstance(value, CellType) and len(value) > MOST_ITEMS:
                others[path] = (value, len(value))
        return Noted(values, others, generators)

    def put(self, values: Mapping[str, Any]) -> None:
        """Give the attributes what `plain_values.plain` returned for each."""
        live = {path: (owner, key, value) for path, owner, (_, key, value), _ in self._walk()}
        owners = {path: value for path, (_, _, value) in live.items()} | {"": self._root}
        for path, value in values.items():
            parent, _, name = path.rpartition(".")
            owner, key, before = live.get(path, (owners.get(parent), name, None))
            if name.isidentifier() or path in live:
                after = restored(value, before)
                if after is not before and owner is not None:
                    assign(owner, key, after)

    @property
    def has_iterators(self) -> bool:
        """Return whether there were iterators, whose positions are in no value, when this was made."""
        return any(_is_bare_iterator(value) for value, _ in self.made.others.values())

    def strangers(self, noted: Noted, *, has_moved: bool) -> dict[str, object]:
        """Return what has no place in another process, by path; also the iterators of the beginning if `has_moved`."""
        found = {}
        for path, (value, length) in noted.others.items():
            before, length_before = self.made.others.get(path, (None, 0))
            is_known = before is value and length_before == length
            if _is_bare_iterator(value):
                if (has_moved or not is_known) and not _is_at_an_end(value):
                    found[path] = value
            elif not is_known:
                found[path] = value
        return found

    def _walk(self) -> Iterator[tuple[str, object, Part, Copy | None]]:
        """Return path, owner and part of each attribute, with a copy if it is a value."""
        seen = {id(each) for each in (self._left_out, self._root, *global_objects())}
        waiting: list[tuple[str, object]] = [("", self._root)]
        for prefix, owner in waiting:  # It grows meanwhile.
            for part in parts_of(prefix, owner):
                path, _, value = part
                if id(value) in seen:
                    continue
                copy = _copy(value)
                yield path, owner, part, copy
                if copy is None and len(seen) < _MOST_OBJECTS and self._is_looked_into(path, value):
                    seen.add(id(value))
                    waiting.append((path, value))

    def _is_looked_into(self, path: str, value: object) -> bool:
        if isinstance(value, _CONTAINERS):
            return True
        if self._known is not None and self._known.get(path, (None, 0))[0] is not value:
            return False  # Its values have no place.
        is_dataset = hasattr(type(value), "__getitem__") and not _holds_sampler(value)
        is_other = isinstance(value, nn.Module | ModuleType | type)
        return not (is_dataset or is_other or type(value).__module__.partition(".")[0] in _OF_THE_PROCESS)


def _holds_sampler(value: object) -> bool:
    """Return whether `value` is a dataset of indices, as Lightning makes one of a sampler to share it among ranks."""
    return any(isinstance(each, Sampler) for each in getattr(value, "__dict__", {}).values())


def _copy(value: object) -> Copy | None:
    try:
        return copy_of(value)
    except NoValueError:
        return None


def _is_bare_iterator(value: object) -> bool:
    """Return whether `value` is an iterator whose position is in no attribute."""
    return isinstance(value, Iterator) and not hasattr(value, "__dict__")


def _is_at_an_end(iterator: Any) -> bool:
    """Return whether `iterator` has not begun, and will be the same in another process, or has no more items."""
    if inspect.isgenerator(iterator):
        return inspect.getgeneratorstate(iterator) in (inspect.GEN_CREATED, inspect.GEN_CLOSED)
    return operator.length_hint(iterator, 1) == 0
