"""Random generators, the search for them in objects, and their states as values that JSON can hold."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

Generators = dict[str, Any]
"""Generators by name. The modules `random` and `numpy.random` stand for the global ones of Python and NumPy."""
States = dict[str, Any]
"""States of generators by name, as numbers, strings, lists, tuples and dicts."""

KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_ARRAY, _HEX = "ndarray", "hex"
_MOST_OBJECTS = 1000
"""Objects that a search looks at: those with generators are near the object that is searched."""


def global_generators() -> Generators:
    """Return the global generators of torch (on the CPU), NumPy and Python."""
    return {"torch": torch.default_generator, "numpy": np.random, "python": random}


def global_objects() -> list[object]:
    """Return the objects that methods such as `random.random`, and arguments, refer to as the global generators."""
    # A method that was pickled for a worker refers to a copy.
    owners = [getattr(method, "__self__", None) for method in (random.random, np.random.random)]
    return [torch.default_generator, *owners]


def own_generators(name: str, root: object) -> Generators:
    """Return the generators in the attributes of `root`, of what these refer to, and so on; each once, no global one.

    Looks into attributes, lists, tuples, deques, dicts, partials, methods and closures, but into no long container.
    """
    found: Generators = {}
    seen = {id(generator) for generator in global_objects()}
    waiting = [(name, root)]
    for path, value in waiting:  # It grows meanwhile.
        if id(value) in seen or len(seen) >= _MOST_OBJECTS:
            continue
        seen.add(id(value))
        if isinstance(value, KINDS):
            found[path] = value
        else:
            waiting += [(inner, part) for inner, _, part in value_parts(path, value)]
    return found


def state_of(generator: Any) -> Any:
    """Return the state of `generator` as a plain value."""
    if isinstance(generator, np.random.Generator):
        return _without_arrays(generator.bit_generator.state)
    if isinstance(generator, random.Random) or generator is random:
        return generator.getstate()
    state = generator.get_state()
    return (_HEX, bytes(state.numpy()).hex()) if isinstance(state, torch.Tensor) else _without_arrays(state)


def states_of(generators: Generators) -> States:
    """Return the state of each generator."""
    return {name: state_of(generator) for name, generator in generators.items()}


def set_state(generator: Any, state: Any) -> None:
    """Give `generator` a state that `state_of` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(list(bytes.fromhex(state[1])), dtype=torch.uint8, device="cpu"))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _with_arrays(state)
    elif isinstance(generator, random.Random) or generator is random:
        generator.setstate(state)
    else:
        generator.set_state(_with_arrays(state))


def _without_arrays(value: Any) -> Any:
    """Return `value` with arrays of numbers as (name of this, dtype, bytes in hexadecimal digits)."""
    if isinstance(value, np.ndarray):
        return (_ARRAY, str(value.dtype), value.tobytes().hex())
    if isinstance(value, dict):
        return {key: _without_arrays(inner) for key, inner in value.items()}
    return tuple(map(_without_arrays, value)) if isinstance(value, tuple) else value


def _with_arrays(value: Any) -> Any:
    if isinstance(value, tuple) and value and value[0] == _ARRAY:
        return np.frombuffer(bytes.fromhex(value[2]), dtype=value[1]).copy()
    if isinstance(value, dict):
        return {key: _with_arrays(inner) for key, inner in value.items()}
    return tuple(map(_with_arrays, value)) if isinstance(value, tuple) else value


# The parts of an object: what its attributes, its items, or its closure refer to.
#
# Searches for random generators, and for what an iteration changes, follow them. Parts of long containers, which hold
# samples, of classes, modules, tensors and arrays are not looked at.


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
