"""What two values are made of, their numbers and letters aside.

Whoever puts something together again asks here whether it is what it was: the same types all the way
down, containers with the same keys in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from typing import Any

import torch


def difference(expected: Any, found: Any, name: str = "") -> str:
    """How `found`, called `name`, is made otherwise than `expected`; empty if it is not. What is the same is not
    looked into."""
    if expected is found:
        return ""
    if type(expected) is not type(found):
        return f"{name}: a {type(expected).__name__} becomes a {type(found).__name__}"
    if isinstance(expected, Mapping):
        return _of_mappings(expected, found, name)
    if isinstance(expected, list | tuple):
        if len(expected) != len(found):
            return f"{name}: {len(expected)} items become {len(found)}"
        pairs = enumerate(zip(expected, found, strict=True))
        return next((finding for i, pair in pairs if (finding := difference(*pair, f"{name}[{i}]"))), "")
    if isinstance(expected, Set):
        return "" if expected == found and _spelt(expected) == _spelt(found) else f"{name}: its members change"
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


def _spelt(members: Any) -> list[str]:
    return sorted(map(repr, members))


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements of `tensor` are one in memory: torch refuses to write into such a tensor."""
    return 0 in tensor.stride() and any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def refuse_expanded(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises TypeError, naming the tensor, for one that nothing could be loaded into."""
    for name, tensor in tensors.items():
        if is_expanded(tensor):
            raise TypeError(
                f"{name} is expanded: several of its elements are one in memory (shape {[*tensor.shape]}, strides "
                f"{[*tensor.stride()]}), so that no checkpoint can be loaded into it. Give it memory of its own: "
                "register_buffer(name, tensor.clone()), or leave it out with persistent=False."
            )
