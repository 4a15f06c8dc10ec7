"""Split a live nested state into flat entries and its containers.

`flatten` refuses, by full name, a container or a key that `structure.rebuild` could not restore.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.format import plain_value
from torchtitan_lite.checkpoint.format.shards import PLAIN_TENSORS, local_of
from torchtitan_lite.checkpoint.format.structure import LIST, MAX_DEPTH, Branch, container_kind, type_name
from torchtitan_lite.log import counted

State = dict[str, Any]

_SUPPORTED = "dict, OrderedDict, Counter, defaultdict of a built-in type, list"
_MODEL = "model."
"""Before the names of the state whose tensors a load copies into live ones, which keep their class."""
_PLAIN = frozenset({int, float, bool, str, bytes, type(None), tuple})
_ENTRIES = _PLAIN | {*PLAIN_TENSORS, DTensor}
"""Types known not to be containers, so that their bases need no check."""


def flatten(state: Mapping[str, Any]) -> tuple[State, Branch]:
    """Return the flat entries of `state`, under DCP's names, and its structure.

    Raises TypeError for a container or a key that a checkpoint cannot restore, and ValueError for two entries with
    the same name and for a state that is nested too deeply or contains itself. Every error names the place.
    """
    walk = _Walk()
    return walk.flat, walk.mapping(state, "", 0)


def flat_tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors in nested mappings and lists under DCP's names; in a tuple, as in other objects, are none.

    Raises ValueError for two tensors with the same name.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor, is_in_tuple in named_tensors(state):
        if is_in_tuple:
            continue
        if name in found:
            raise ValueError(f"two tensors of the state are called {name!r} in a checkpoint")
        found[name] = tensor
    return found


def named_tensors(
    value: Any, name: str | None = None, is_in_tuple: bool = False
) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield the tensors in nested mappings, lists and tuples under DCP's names, and whether each is in a tuple."""
    if isinstance(value, torch.Tensor):
        yield name or "", value, is_in_tuple
    elif isinstance(value, Mapping | list | tuple):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            below = f"{key}" if name is None else f"{name}.{key}"
            yield from named_tensors(inner, below, is_in_tuple or isinstance(value, tuple))


class _Walk:
    """Walks through a state and collects its entries in `flat`."""

    def __init__(self) -> None:
        self.flat: State = {}

    def mapping(self, value: Mapping[Any, Any], prefix: str, depth: int) -> Branch:
        kind = container_kind(value)
        if kind is None:
            what = f"defaultdict of {value.default_factory!r}" if type(value) is defaultdict else type_name(value)
            raise TypeError(f"{_holder(prefix)} is a {what}, {_would_not_come_back('dict(...)')}")
        keys = tuple(value)
        is_text = {*map(type, keys)} <= {str} and _is_encodable("".join(keys))
        names = keys if is_text else [_key_text(key, prefix) for key in keys]
        children = tuple(
            [self._child(item, prefix + name, depth) for item, name in zip(value.values(), names, strict=True)]
        )
        return Branch(kind, keys, () if is_text else tuple(map(repr, keys)), children)

    def _list(self, value: list[Any], prefix: str, depth: int) -> Branch:
        if type(value) is not list:
            raise TypeError(f"{_holder(prefix)} is a {type_name(value)}, {_would_not_come_back('list(...)')}")
        children = tuple([self._child(item, f"{prefix}{number}", depth) for number, item in enumerate(value)])
        return Branch(LIST, range(len(value)), (), children)

    def _child(self, value: Any, name: str, depth: int) -> Branch | None:
        if type(value) not in _ENTRIES:
            is_mapping = isinstance(value, Mapping)
            if is_mapping or (isinstance(value, list) and not _is_entry(value, name, 0)):
                if depth + 1 >= MAX_DEPTH:
                    raise _too_deep(name)
                return (self.mapping if is_mapping else self._list)(value, f"{name}.", depth + 1)
            if isinstance(value, torch.Tensor) and depth and not name.startswith(_MODEL):
                raise TypeError(
                    f"{name} is a {type_name(value)}, which would come back from a checkpoint as a plain tensor, "
                    "without its class and attributes. Return plain tensors from state_dict, and what else it has next "
                    "to them"
                )
        if name in self.flat:
            raise ValueError(
                f"two entries of the state are both called {name!r} in a checkpoint, and one of them would be lost. "
                "Give them keys that differ when joined by dots"
            )
        if type(value) is DTensor and any(placement.is_partial() for placement in value.placements):
            raise TypeError(f"{name} is a DTensor of partial sums: no rank has its values. Redistribute it first")
        self.flat[name] = value
        return None


def _is_entry(value: list[Any], name: str, depth: int) -> bool:
    """Return whether DCP stores the list as one object: no tensor or mapping is in it or in its nested lists."""
    if depth > MAX_DEPTH:
        raise _too_deep(name)
    kinds = {*map(type, value)} - _PLAIN
    if any(issubclass(kind, Mapping | torch.Tensor) for kind in kinds):
        return False
    if not any(issubclass(kind, list) for kind in kinds):
        return True
    return all(_is_entry(item, name, depth + 1) for item in value if isinstance(item, list))


def _too_deep(name: str) -> ValueError:
    return ValueError(f"{name[:200]} is nested more than {MAX_DEPTH} deep, or contains itself")


def _key_text(key: Any, prefix: str) -> str:
    """Return `key` as a part of a name."""
    try:
        plain_value.encode_value(key)
        text = str(key)
        # Half a surrogate pair cannot be encoded, so it cannot be part of a name.
        text.encode()
        return text
    except ValueError:
        shown = f"{key!r:.100}" if type(key) is str else f"a {type_name(key)}"
        raise TypeError(
            f"{_holder(prefix)} has {shown} as a key, which would not come back from a checkpoint as it is. Supported "
            "keys are strings, numbers, booleans, None, bytes and tuples of these: return such keys from state_dict"
        ) from None


def _holder(prefix: str) -> str:
    return prefix.removesuffix(".") or "the state"


def _is_encodable(key: str) -> bool:
    return key.isascii() or key.encode("utf-8", "ignore").decode() == key


def _would_not_come_back(remedy: str) -> str:
    return (
        f"which would not come back from a checkpoint as it is. Supported containers are {_SUPPORTED}: "
        f"return {remedy} of it from state_dict, and convert it back in load_state_dict"
    )


# Compare how two values are made, without the values of their numbers and strings.
#
# Code that rebuilds a state uses this to prove that the result is the original: the same types at every level, and
# containers with the same keys in the same order. Also here: the checks for tensors that a load cannot write into, or
# that are pieces of others.


def difference(expected: Any, found: Any, name: str = "") -> str:
    """Return the first difference in type or structure of `found`, under the name `name`, from `expected`.

    Returns the empty string if there is none. Objects that are identical (`is`) are not compared further.
    """
    if expected is found:
        return ""
    if type(expected) is not type(found):
        return f"{name}: a {type(expected).__name__} becomes a {type(found).__name__}"
    if isinstance(expected, Mapping):
        return _of_mappings(expected, found, name)
    if isinstance(expected, list | tuple):
        if len(expected) != len(found):
            return f"{name}: {counted(len(expected), 'item')} become {len(found)}"
        pairs = enumerate(zip(expected, found, strict=True))
        return next((finding for i, pair in pairs if (finding := difference(*pair, f"{name}[{i}]"))), "")
    if isinstance(expected, Set):
        is_same = expected == found and sorted(map(repr, expected)) == sorted(map(repr, found))
        return "" if is_same else f"{name}: its members change"
    if isinstance(expected, torch.Tensor) and (expected.dtype, expected.shape) != (found.dtype, found.shape):
        return f"{name}: a tensor of {expected.dtype} {[*expected.shape]} becomes {found.dtype} {[*found.shape]}"
    return ""


def _of_mappings(expected: Mapping[Any, Any], found: Mapping[Any, Any], name: str) -> str:
    if [(type(key), repr(key)) for key in expected] != [(type(key), repr(key)) for key in found]:
        return f"{name}: its keys change"
    if isinstance(expected, defaultdict) and expected.default_factory is not found.default_factory:  # type: ignore[attr-defined]  # of the same type
        return f"{name}: its default changes"
    pairs = zip(expected.items(), found.values(), strict=True)
    return next((finding for (key, a), b in pairs if (finding := difference(a, b, f"{name}[{key!r}]"))), "")


def is_plain(value: object) -> bool:
    """Return whether `value` is a tensor or parameter of torch's own class, or a DTensor of such."""
    return isinstance(value, torch.Tensor) and type(local_of(value)) in PLAIN_TENSORS


def wide_float(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or floats of 8 bits as wider ones: for these torch computes nothing."""
    return tensor.float() if f"{tensor.dtype}".startswith("torch.float8") else tensor


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether several elements of `tensor` share memory: torch refuses to write into such a tensor."""
    if tensor.layout is not torch.strided:
        return False
    return 0 in tensor.stride() and any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def refuse_piece(name: str, tensor: torch.Tensor) -> None:
    """Raise TypeError, naming the tensor, if it says of itself that it is a piece of a larger one.

    torch 2.14 and later know it as `torch.distributed.checkpoint.CheckpointableTensor`. A state dict of a module leaves
    that out, and no optimizer gives it to its state: then each rank would have another tensor of the same name.
    """
    if all(hasattr(tensor, each) for each in _OF_PIECES):
        raise TypeError(
            f"{name} is a CheckpointableTensor, the pieces at {[*tensor.global_offsets]} of a tensor of shape "  # type: ignore[attr-defined]  # asked for above
            f"{[*tensor.global_shape]}, and a checkpoint has a DTensor for such a tensor: make it one with "  # type: ignore[attr-defined]  # as above
            "DTensor.from_local(tensor, mesh, placements)."
        )


_OF_PIECES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""The attributes of a CheckpointableTensor."""


def refuse_expanded(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise TypeError, naming the tensor, if one of them is expanded, or sparse: no load can write into it."""
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"{name} has the layout {tensor.layout}, and a checkpoint has dense tensors only. Register its parts "
                "(indices and values) as buffers, or leave it out with persistent=False."
            )
        if is_expanded(tensor):
            raise TypeError(
                f"{name} is expanded: several of its elements share memory (shape {[*tensor.shape]}, strides "
                f"{[*tensor.stride()]}), so no checkpoint can be loaded into it. Give it memory of its own: "
                "register_buffer(name, tensor.clone()), or leave it out with persistent=False."
            )
