"""Copies of values, and their form in a checkpoint, which needs no pickle.

A value is a number, a string, an array, a tensor, a random generator, or a container of values. A copy is cheap to make
and to compare, and stays in this process; most copies are never written. `plain` has the form that `rank_state.pack`
takes.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import random
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch

from torchtitan_lite.data.generators import KINDS, set_state, state_of

_MOST_BYTES = 32 * 2**20
"""Of a copy: a longer one is in no checkpoint."""


@dataclass(frozen=True)
class ValueDigest:
    """What is kept of a value that is too long."""

    size: int
    digest: bytes


Copy = bytes | ValueDigest | tuple[str, str, Any]
"""Equal copies are of equal values; a tuple is of a random generator."""

_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict, Counter)
_VALUES = frozenset((*_SCALARS, *_CONTAINERS, range, bytearray, np.ndarray, torch.Tensor))


class NoValueError(Exception):
    """What should be copied, or written, is no value, or has a part that is none."""


def copy_of(value: object) -> Copy:
    """Return a copy of `value`. Raise NoValueError if it is none."""
    if isinstance(value, random.SystemRandom):
        raise NoValueError("SystemRandom")  # It has no state.
    if isinstance(value, KINDS):
        return ("generator", _generator_kind(value), state_of(value))
    if type(value) not in _VALUES and not isinstance(value, np.generic):
        raise NoValueError(type(value).__name__)
    file = io.BytesIO()
    try:
        _Copier(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except (NoValueError, pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise NoValueError(type(value).__name__) from error
    found = file.getvalue()
    return found if len(found) <= _MOST_BYTES else ValueDigest(len(found), hashlib.blake2b(found).digest())


def plain(copy: Copy) -> Any:
    """Return a copy in the form that a checkpoint has. Raise NoValueError if it has none."""
    if isinstance(copy, ValueDigest):
        raise NoValueError(f"value of {copy.size / 2**20:.0f} MiB")
    return copy if isinstance(copy, tuple) else _plain_value(pickle.loads(copy))  # made by copy_of in this process


def restored(value: Any, live: object) -> Any:
    """Return the value that `plain` wrote: `live`, changed in place, if it is an object of the same kind."""
    if isinstance(value, tuple) and value[0] == "generator":
        generator = live if isinstance(live, KINDS) and _generator_kind(live) == value[1] else _new_generator(value[1])
        set_state(generator, value[2])
        return generator
    return _in_place(_restored_value(value), live)


class _Copier(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                raise NoValueError(str(value.layout))
            return _tensor_of_bytes, (*_bytes_and_dtype(value.detach().cpu()), tuple(value.shape))
        if isinstance(value, np.generic | np.dtype | type | FunctionType | BuiltinFunctionType):
            return NotImplemented
        if type(value) not in _VALUES:
            raise NoValueError(type(value).__name__)
        return NotImplemented


def _bytes_and_dtype(tensor: torch.Tensor) -> tuple[bytes, str]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), str(tensor.dtype).partition(".")[2]


def _tensor_of_bytes(data: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)


def _plain_value(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple, set, frozenset):
        return (type(value).__name__, _plain_items([*value]))
    if type(value) is deque:
        return ("deque", _plain_items([*value]), value.maxlen)
    if type(value) in (dict, OrderedDict, Counter, defaultdict):
        return (type(value).__name__, _plain_items([*value]), _plain_items([*value.values()]))
    if type(value) in (bytes, bytearray):
        return (type(value).__name__, value.hex())
    if type(value) is range:
        return ("range", [value.start, value.stop, value.step])
    if isinstance(value, np.ndarray | np.generic) and value.dtype.hasobject is False:
        array = np.asarray(value)
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return (kind, array.tobytes().hex(), array.dtype.str, list(array.shape))
    if isinstance(value, torch.Tensor):
        data, dtype = _bytes_and_dtype(value)
        return ("tensor", data.hex(), dtype, list(value.shape))
    raise NoValueError(type(value).__name__)


def _plain_items(values: list[Any]) -> Any:
    """Return `values` in one string if they are whole numbers: an order of samples is long."""
    kinds = {type(value) for value in values}
    for kind in (int, np.int64):
        if kinds == {kind} and all(-(2**63) <= value < 2**63 for value in values):
            return (kind.__name__, np.array(values, dtype="<i8").tobytes().hex())
    return [_plain_value(value) for value in values]


def _restored_values(items: Any) -> list[Any]:
    if isinstance(items, list):
        return [_restored_value(item) for item in items]
    array = np.frombuffer(bytes.fromhex(items[1]), dtype="<i8")
    return array.tolist() if items[0] == "int" else [*array]


def _restored_value(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    kind, data, *more = value
    if kind in ("array", "number"):
        array = np.frombuffer(bytes.fromhex(data), dtype=more[0]).reshape(more[1]).copy()
        return array if kind == "array" else array[()]
    if kind == "tensor":
        return _tensor_of_bytes(bytes.fromhex(data), more[0], tuple(more[1]))
    if kind in ("bytes", "bytearray"):
        return bytes.fromhex(data) if kind == "bytes" else bytearray.fromhex(data)
    if kind == "range":
        return range(*data)
    if kind == "deque":
        return deque(_restored_values(data), more[0])
    if kind in ("dict", "OrderedDict", "Counter", "defaultdict"):
        pairs = dict(zip(_restored_values(data), _restored_values(more[0]), strict=True))
        made: dict[Any, Any] = {"OrderedDict": OrderedDict, "Counter": Counter}.get(kind, dict)(pairs)
        return made
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](_restored_values(data))


def _in_place(value: Any, live: Any) -> Any:
    """Return `value`, as `live` if that can become equal: iterators and others may refer to it."""
    if isinstance(live, list | bytearray) and type(value) is type(live):
        live[:] = value
    elif isinstance(live, deque) and type(value) is deque and live.maxlen == value.maxlen:
        live.clear()
        live.extend(value)
    elif isinstance(live, dict | set) and (type(value) is type(live) or isinstance(live, defaultdict)):
        live.clear()
        live.update(value)
    elif isinstance(live, np.ndarray) and live.flags.writeable and _type_and_shape(live) == _type_and_shape(value):
        live[...] = value
    elif isinstance(live, torch.Tensor) and _type_and_shape(live) == _type_and_shape(value) and not live.requires_grad:
        live.copy_(value)
    else:
        return value
    return live


def _type_and_shape(value: Any) -> tuple[Any, ...]:
    return type(value), getattr(value, "dtype", None), getattr(value, "shape", None)


def _generator_kind(generator: Any) -> str:
    kind = type(generator).__name__
    return f"{kind}({type(generator.bit_generator).__name__})" if isinstance(generator, np.random.Generator) else kind


def _new_generator(kind: str) -> Any:
    """Return a generator of `kind`, with any state."""
    if kind == "Generator":
        return torch.Generator()
    if kind == "Random":
        return random.Random()
    if kind == "RandomState":
        return np.random.RandomState()
    name = kind.removeprefix("Generator(").removesuffix(")")
    return np.random.Generator(getattr(np.random, name)())
