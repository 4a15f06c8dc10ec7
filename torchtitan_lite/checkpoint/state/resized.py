"""Buffers that a load finds in another shape or dtype than they were saved with.

Observers of quantization, and other modules, give their buffers a shape when they see the first batch, and their own
`_load_from_state_dict` takes buffers of any shape. Such a buffer is read into new memory, which the module then gets.
Whether it takes that is tried on a copy before anything is read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.format.key_report import TensorLike
from torchtitan_lite.torch_private import (
    buffers_of,
    load_alone,
    loads_in_its_own_way,
    version_of_module,
    without_children,
)


def resized_buffers(root: nn.Module, raw: State, stored: Mapping[str, TensorLike]) -> State:
    """Return new memory for the entries of `raw`, the state dict of `root`, that are buffers and fit no longer.

    `stored` has shapes and dtypes by the same keys. Leaves out what the module would not take.
    """
    found: State = {}
    for key, like in stored.items():
        own = raw.get(key)
        if type(own) is not torch.Tensor or (own.shape, own.dtype) == (like.shape, like.dtype):
            continue
        path, _, name = key.rpartition(".")
        try:
            module = root.get_submodule(path)
        except AttributeError:  # A key that a hook made.
            continue
        if name in buffers_of(module) and loads_in_its_own_way(module):
            found.setdefault(path, {})[name] = torch.empty(like.shape, dtype=like.dtype, device=own.device)
    return {
        f"{path}.{name}" if path else name: value
        for path, values in found.items()
        if _takes(root.get_submodule(path), raw, path, values)
        for name, value in values.items()
    }


def _takes(module: nn.Module, raw: State, path: str, values: State) -> bool:
    """Return whether `module`, without its children, loads `values` next to its other buffers. Changes nothing."""
    prefix = f"{path}." if path else ""
    own = {name: None if each is None else each.clone() for name, each in buffers_of(module).items()}
    probe = without_children(module, own)
    given = {f"{prefix}{name}": each for name, each in own.items() if f"{prefix}{name}" in raw}
    given |= {f"{prefix}{name}": torch.zeros_like(each) for name, each in values.items()}
    try:
        with torch.no_grad():
            errors = load_alone(probe, given, prefix, version_of_module(raw, path))
    except Exception:  # The comparison of all keys then names it.
        return False
    shapes = {name: None if each is None else each.shape for name, each in buffers_of(probe).items()}
    return not errors and all(shapes.get(name) == each.shape for name, each in values.items())
