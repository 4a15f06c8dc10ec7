"""Compare how two values are made, without the values of their numbers and strings.

Code that rebuilds a state uses this to prove that the result is the original: the same types at every
level, and containers with the same keys in the same order. Also here: the checks for tensors that a load
cannot write into, or that are pieces of others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from typing import Any

import torch

from torchtitan_lite.checkpoint.format.shards import local_of
from torchtitan_lite.log import counted


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
        return "" if expected == found and _reprs(expected) == _reprs(found) else f"{name}: its members change"
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


def _reprs(members: Any) -> list[str]:
    return sorted(map(repr, members))


def is_plain(value: object) -> bool:
    """Return whether `value` is a tensor or parameter of torch's own class, or a DTensor of such."""
    return isinstance(value, torch.Tensor) and type(local_of(value)) in (torch.Tensor, torch.nn.Parameter)


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
