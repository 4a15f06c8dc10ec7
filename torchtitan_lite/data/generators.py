"""Random generators and their states, as values that JSON can hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from torchtitan_lite.data.parts import value_parts

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


def set_state(generator: Any, state: Any) -> None:
    """Give `generator` a state that `state_of` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(list(bytes.fromhex(state[1])), dtype=torch.uint8))
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
