"""Random generators and their states, as values that JSON can hold."""

from __future__ import annotations

import random
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
_MOST_ITEMS = 100
"""Items of a container that a search looks into: longer ones hold samples."""


def global_generators() -> Generators:
    """Return the global generators of torch (on the CPU), NumPy and Python."""
    return {"torch": torch.default_generator, "numpy": np.random, "python": random}


def own_generators(name: str, root: object) -> Generators:
    """Return the generators in the attributes of `root`, of what these refer to, and so on; each once, no global one.

    Looks into attributes, lists, tuples, dicts, partials, methods and closures, but into no long container.
    """
    found: Generators = {}
    # A method such as random.random refers to its generator; one that was pickled for a worker refers to a copy.
    owners = [getattr(method, "__self__", None) for method in (random.random, np.random.random)]
    seen = {id(generator) for generator in (torch.default_generator, *owners)}
    waiting = [(name, root)]
    for path, value in waiting:  # It grows meanwhile.
        if id(value) in seen or len(seen) >= _MOST_OBJECTS:
            continue
        seen.add(id(value))
        if isinstance(value, KINDS):
            found[path] = value
        else:
            waiting += _parts(path, value)
    return found


def state_of(generator: Any) -> Any:
    """Return the state of `generator` as a plain value."""
    if isinstance(generator, np.random.Generator):
        return _without_arrays(generator.bit_generator.state)
    if isinstance(generator, random.Random) or generator is random:
        return generator.getstate()
    state = generator.get_state()
    return (_HEX, bytes(state.numpy()).hex()) if isinstance(state, torch.Tensor) else _without_arrays(state)


def set_state(generator: Any, state: Any) -> None:
    """Give `generator` a state that `state_of` returned."""
    if isinstance(generator, torch.Generator):
        values = bytes.fromhex(state[1]) if state[0] == _HEX else state  # Numbers in earlier checkpoints.
        generator.set_state(torch.tensor(list(values), dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _with_arrays(state)
    elif isinstance(generator, random.Random) or generator is random:
        generator.setstate(state)
    else:
        generator.set_state(_with_arrays(state))


def _parts(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, list | tuple) and len(value) <= _MOST_ITEMS:
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, dict) and len(value) <= _MOST_ITEMS:
        yield from ((f"{path}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, partial):
        yield from ((f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, MethodType | BuiltinMethodType):
        yield f"{path}.__self__", value.__self__
    elif isinstance(value, FunctionType):
        names, cells = value.__code__.co_freevars, value.__closure__ or ()
        yield from ((f"{path}.{name}", cell) for name, cell in zip(names, cells, strict=True))
    elif isinstance(value, CellType):
        with suppress(ValueError):  # It is empty.
            yield path, value.cell_contents
    elif not isinstance(value, type | ModuleType | torch.Tensor | np.ndarray):
        yield from ((f"{path}.{name}", each) for name, each in getattr(value, "__dict__", {}).items())


def _without_arrays(value: Any) -> Any:
    """Return `value` with arrays of numbers as (name of this, dtype, bytes in hexadecimal digits)."""
    if isinstance(value, np.ndarray):
        return (_ARRAY, str(value.dtype), value.tobytes().hex())
    if isinstance(value, dict):
        return {key: _without_arrays(inner) for key, inner in value.items()}
    return tuple(map(_without_arrays, value)) if isinstance(value, tuple) else value


def _with_arrays(value: Any) -> Any:
    if isinstance(value, tuple) and value and value[0] == _ARRAY:
        if isinstance(value[2], list):  # Of an earlier checkpoint.
            return np.array(value[2], dtype=value[1])
        return np.frombuffer(bytes.fromhex(value[2]), dtype=value[1]).copy()
    if isinstance(value, dict):
        return {key: _with_arrays(inner) for key, inner in value.items()}
    return tuple(map(_with_arrays, value)) if isinstance(value, tuple) else value
