"""The parts of an object: what its attributes, its items, or its closure refer to.

Searches for random generators, and for what an iteration changes, follow them. Parts of long containers, which hold
samples, of classes, modules, tensors and arrays are not looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

MOST_ITEMS = 100
"""Items of a container that a search looks into: longer ones hold samples."""

Part = tuple[str, Any, object]
"""Its path, its key in its owner, and the part."""


def value_parts(path: str, value: object) -> Iterator[Part]:
    """Return the parts of `value`, whose own path is `path`."""
    if isinstance(value, list | tuple | deque):
        if len(value) <= MOST_ITEMS:
            yield from ((f"{path}[{index}]", index, item) for index, item in enumerate(value))
    elif isinstance(value, dict):
        if len(value) <= MOST_ITEMS:
            yield from ((f"{path}[{key!r}]", key, item) for key, item in value.items())
    elif isinstance(value, partial):
        yield from ((f"{path}.{name}", name, getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, MethodType | BuiltinMethodType):
        yield f"{path}.__self__", "__self__", value.__self__
    elif isinstance(value, FunctionType):
        names, cells = value.__code__.co_freevars, value.__closure__ or ()
        yield from ((f"{path}.{name}", name, cell) for name, cell in zip(names, cells, strict=True))
    elif isinstance(value, CellType):
        with suppress(ValueError):  # It is empty.
            yield path, "cell_contents", value.cell_contents
    elif not isinstance(value, type | ModuleType | torch.Tensor | np.ndarray):
        yield from ((f"{path}.{name}", name, each) for name, each in getattr(value, "__dict__", {}).items())
        yield from _in_slots(path, value)


def assign(owner: Any, key: Any, value: object) -> None:
    """Make `value` the part of `owner` with `key`. What cannot be changed stays as it is."""
    if isinstance(owner, list | deque | dict):
        owner[key] = value
    elif isinstance(owner, CellType):
        owner.cell_contents = value
    elif not isinstance(owner, tuple | partial | MethodType | BuiltinMethodType | FunctionType):
        object.__setattr__(owner, key, value)


def _in_slots(path: str, value: object) -> Iterator[Part]:
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield f"{path}.{name}", name, getattr(value, name)
