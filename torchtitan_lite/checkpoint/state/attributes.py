"""What a parameter or a buffer is besides its elements, which are all that a checkpoint has of it.

Tensors in its attributes, such as a scale that forward reads, are in a resumed run those that its model is built with.
And a load copies into the tensor by `copy_` of its class, which may round. Both are named once, at the first save.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from torchtitan_lite.checkpoint.format.flattening import State, flat_tensors
from torchtitan_lite.checkpoint.format.kinds import is_plain
from torchtitan_lite.checkpoint.format.shards import local_of
from torchtitan_lite.checkpoint.state.in_place import storage_of
from torchtitan_lite.checkpoint.state.names import EXTRA_STATE, listed
from torchtitan_lite.checkpoint.state.other_keys import saved_tensors
from torchtitan_lite.log import logger
from torchtitan_lite.torch_private import is_set_by_torch

_OF_ONE_STEP = "main_grad"
"""Where Megatron, Apex and Transformer Engine sum the gradients of a step."""


def tensors_in_attributes(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors in attributes of `tensor`, and in lists, tuples and dicts there, by `.attribute`."""
    found: dict[str, torch.Tensor] = {}
    for owner in (tensor, local_of(tensor)):
        for name, value in getattr(owner, "__dict__", {}).items():
            if name == _OF_ONE_STEP or is_set_by_torch(owner, name):
                continue
            inner: Mapping[Any, Any] = {"": value}
            if isinstance(value, dict):
                inner = {f"[{key!r}]": each for key, each in value.items()}
            elif isinstance(value, list | tuple):
                inner = {f"[{number}]": each for number, each in enumerate(value)}
            found |= {f".{name}{key}": each for key, each in inner.items() if isinstance(each, torch.Tensor)}
    return found


def warn_of_attributes(modules: Mapping[str, Sequence[nn.Module]], state: State, left_out: Collection[str]) -> None:
    """Log what of the tensors of `modules`, by name of their state, no load of `state`, the full one, brings back.

    Those of `left_out`, by the same names, are in no checkpoint anyway.
    """
    named = [
        (f"{of_state}.{name}", tensor)
        for of_state, parts in modules.items()
        for part in parts
        for name, tensor in saved_tensors(part).items()
        if f"{of_state}.{name}" not in left_out and _extra_state_of(name) not in state[of_state]
    ]
    attributes = {
        f"{name}{place}": each
        for name, tensor in named
        if storage_of(tensor)  # Else it is a wrapper of these, which the save refuses.
        for place, each in tensors_in_attributes(tensor).items()
    }
    if lost := _not_in(state, attributes):
        logger.warning(
            "No checkpoint has tensors in attributes of parameters and buffers: %s. A resumed run has those with which "
            "its model is built. If they may differ, register them as buffers, or return them from get_extra_state",
            listed(lost),
        )
    if rounded := [f"{name} ({type(local_of(tensor)).__name__})" for name, tensor in named if _is_rounded(tensor)]:
        logger.warning(
            "A load does not bring back the values of %s: it copies into the tensor, and copy_ of its class changes "
            "what it is given. Have copy_ keep the values, or keep to those that it keeps",
            listed(rounded),
        )


def _extra_state_of(name: str) -> str:
    """Return the key of the extra state of a tensor's module, which may have what the tensor has in attributes."""
    path = name.rpartition(".")[0]
    return f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE


def _not_in(state: State, attributes: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of those `attributes` that are neither in `state` nor share memory with a tensor in it."""
    if not attributes:
        return []
    saved = flat_tensors(state)
    memory = {storage_of(each) for each in saved.values()} - {0}
    return [
        name
        for name, each in attributes.items()
        if name not in saved and storage_of(each) not in memory and each.numel() and not each.is_meta
    ]


def _is_rounded(tensor: torch.Tensor) -> bool:
    """Return whether a copy of `tensor` has other values than it, because its class copies in its own way."""
    local = local_of(tensor)
    if is_plain(local):
        return False
    # A class of another library may support nothing of this.
    with torch.no_grad(), suppress(Exception):
        probe = local.detach().clone().as_subclass(type(local))
        vars(probe).update(vars(local))
        probe.copy_(local.detach())
        return not torch.equal(_bytes(probe), _bytes(local))
    return False


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(torch.Tensor).contiguous().reshape(-1).view(torch.uint8)
