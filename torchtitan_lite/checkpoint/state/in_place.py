"""A `load_state_dict` that copies no tensor onto itself.

A load reads into the tensors that `state_dict` returned. Most of them are views of the live parameters,
and to copy each onto itself would read and write the model's memory once more. `Tensor.copy_` does
nothing where source and target are one tensor object, so each module is handed its own parameters for
such views, after all its load hooks have seen plain tensors, as they would from a file.

A hook may also give a live tensor's memory to another name (a swap): copying it while its source is
being overwritten would mix the two, so such a view is cloned first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@contextmanager
def no_self_copies(root: nn.Module) -> Iterator[None]:
    """Let `root.load_state_dict` within find its live tensors in the dict at no cost."""
    live = _Live(root)
    handles = [
        module.register_load_state_dict_pre_hook(live.hand_out)  # type: ignore[no-untyped-call]  # torch's is not typed
        for module in {id(each): each for each in root.modules()}.values()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Live:
    """The parameters and buffers of a module, by raw name."""

    def __init__(self, root: nn.Module) -> None:
        named = chain(root.named_parameters(remove_duplicate=False), root.named_buffers(remove_duplicate=False))
        self._tensors = dict(named)
        self._storages = {_storage(tensor) for tensor in self._tensors.values()} - {0}

    def hand_out(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Be the last load hook of `module`; see the module's docstring."""
        rewrites = len(module._load_state_dict_pre_hooks) > 1 or _has_its_own_way(module)
        for key, value in state_dict.items():
            if not isinstance(value, torch.Tensor) or not key.startswith(prefix):
                continue
            tensor = self._tensors.get(key)
            is_own = "." not in key[len(prefix) :]
            if tensor is not None and _is_same_memory(value, tensor):
                state_dict[key] = tensor if is_own else value
            elif (is_own or rewrites) and _storage(value) in self._storages:
                state_dict[key] = value.clone()


def _has_its_own_way(module: nn.Module) -> bool:
    return type(module)._load_from_state_dict is not nn.Module._load_from_state_dict


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if isinstance(a, DTensor) != isinstance(b, DTensor):
        return False
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        if a.placements != b.placements or a.shape != b.shape:
            return False
        a, b = a._local_tensor, b._local_tensor
    if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()) or a.device != b.device:
        return False
    return a.numel() > 0 and _address(a) == _address(b) != 0


def _storage(tensor: torch.Tensor) -> int:
    try:
        return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # Tensors that are made of others have no memory of their own.
        return 0


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
