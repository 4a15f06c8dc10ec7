"""What a parameter or a buffer is besides its elements, which are all that a checkpoint has of it.

Tensors in its attributes, such as a scale that forward reads, are in a resumed run those that its model is built with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchtitan_lite.checkpoint.format.shards import local_of
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
