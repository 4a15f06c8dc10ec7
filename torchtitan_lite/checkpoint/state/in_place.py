"""Makes `load_state_dict` safe over tensors that were read in place.

A load reads into the tensors that `state_dict` returned, and most of these are views of live ones.
`Tensor.copy_` does nothing if source and target are the same view, so `load_state_dict` with all of
them costs nothing. But a load hook may put the memory of one live tensor under another name (a swap),
and a copy from memory that is being overwritten would mix the two. Such a view is cloned first, after
all hooks of the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.format.shards import local_of
from torchtitan_lite.torch_private import has_load_hooks, loads_in_its_own_way


@contextmanager
def no_mixing(root: nn.Module) -> Iterator[None]:
    """Within this context, keep `root.load_state_dict` from copying one live tensor into another while both change."""
    rewriting = {id(each): each for each in root.modules() if loads_in_its_own_way(each) or has_load_hooks(each)}
    live = _Live(root) if rewriting else None
    handles = [
        module.register_load_state_dict_pre_hook(live.clone_strays)  # type: ignore[no-untyped-call]  # torch's is not typed
        for module in rewriting.values()
        if live is not None
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
        self._storages = {storage_of(tensor) for tensor in self._tensors.values()} - {0}

    def clone_strays(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Clone the entries that are live memory of another name. Runs as the last load hook of `module`."""
        for key, value in state_dict.items():
            if not isinstance(value, torch.Tensor) or not key.startswith(prefix):
                continue
            if storage_of(value) in self._storages and not _is_same_view(value, self._tensors.get(key)):
                state_dict[key] = value.clone()


def _is_same_view(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    if b is None or isinstance(a, DTensor) != isinstance(b, DTensor):
        return False
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        if a.placements != b.placements or a.shape != b.shape:
            return False
        a, b = local_of(a), local_of(b)
    return (a.dtype, a.shape, a.stride(), a.data_ptr()) == (b.dtype, b.shape, b.stride(), b.data_ptr())


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of the memory of `tensor` on this rank; 0 if it has none."""
    try:
        return local_of(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        # Wrapper subclasses over other tensors have no memory of their own.
        return 0
