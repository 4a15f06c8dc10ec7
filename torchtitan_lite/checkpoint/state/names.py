"""Names that do not depend on how a run is parallelised.

A name here is the plain model's FQN, without prefixes of DDP, FSDP, compilation or activation
checkpointing. Every key of a checkpoint with a parameter's name in it uses these, so the model parts of
one rank (pipeline stages) must not share a name. A key that a state-dict hook made need not be an
attribute of any module; it stays as it is from the first unknown component on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from torchtitan_lite.checkpoint.format.shards import has_same_form, local_of
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.torch_private import (
    COMPILED,
    WRAPPED_BY_FSDP1,
    WRAPPED_FOR_RECOMPUTING,
    has_load_hooks,
    is_compiled,
    loads_in_its_own_way,
)

EXTRA_STATE = "_extra_state"
"""Last component of the key under which `get_extra_state` of a module is saved."""
SHOWN = 4
T = TypeVar("T")


def clean_names(module: nn.Module, raw_names: Iterable[str]) -> dict[str, str]:
    """Return the plain name of each of `raw_names`, which are keys of `module`'s state dict or names of parameters."""
    known: dict[str, tuple[list[str], Any]] = {"": ([], module)}
    return {raw: ".".join(_walked(raw.replace(WRAPPED_FOR_RECOMPUTING, ""), known)[0]) for raw in raw_names}


def with_clean_names(module: nn.Module, raw: Mapping[str, T]) -> dict[str, T]:
    """Return the entries of `raw`, which has such names, by plain name."""
    return dict(zip(clean_names(module, raw).values(), raw.values(), strict=True))


def is_extra_name(name: str) -> bool:
    """Return whether an entry of a model's state dict with this name is a module's extra state."""
    return name.endswith(EXTRA_STATE) and name.rpartition(".")[2] == EXTRA_STATE


def named_parameters(parts: Sequence[nn.Module]) -> dict[torch.Tensor, tuple[str, ...]]:
    """Return each parameter of `parts` with its names. A tied one has several, and is saved under the first.

    Raises ConfigError for a name that two parts share.
    """
    names: dict[torch.Tensor, tuple[str, ...]] = {}
    per_part: list[dict[str, Any]] = []
    for part in parts:
        own = with_clean_names(part, dict(part.named_parameters(remove_duplicate=False)))
        per_part.append(own)
        for name, parameter in own.items():
            names[parameter] = (*names.get(parameter, ()), name)
    merge_disjoint(per_part)
    return names


def reshard_modules(parts: Sequence[nn.Module]) -> None:
    """Have modules of `fully_shard` hold their sharded parameters, which are those of the optimizers, again.

    After a forward pass without a backward pass, as of an evaluation, or after `unshard`, they may hold unsharded ones.
    """
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def merge_disjoint(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return all entries of `parts`; raise ConfigError for a name that is in two of them."""
    merged: dict[str, Any] = {}
    for part in parts:
        shared = sorted(merged.keys() & part.keys())
        if shared:
            raise ConfigError(
                f"two model parts of this rank share the name {shared[0]!r}"
                + (f" and {len(shared) - 1} more" if len(shared) > 1 else "")
                + "; one of them would be lost in a checkpoint. Give each part of a pipeline its own layers; put "
                "several models, as of a GAN, into one: model=nn.ModuleDict({'first': ..., 'second': ...})."
            )
        merged.update(part)
    return merged


def refuse_lazy(parts: Sequence[nn.Module]) -> None:
    """Raise ConfigError for the first parameter or buffer of a lazy module that has no shape yet."""
    for part in parts:
        for kind in (part.named_parameters(), part.named_buffers()):
            for name, tensor in kind:
                if is_lazy(tensor):
                    raise ConfigError(
                        f"model: {name!r} belongs to a lazy module and has no shape yet. Run one batch through the "
                        "model, on every rank, before the first load() or save()."
                    )


def _walked(raw: str, known: dict[str, tuple[list[str], Any]]) -> tuple[list[str], Any]:
    """Return the components of the plain name of `raw`, and the object of that name; `known` caches both."""
    if raw not in known:
        parent, _, component = raw.rpartition(".")
        clean, owner = _walked(parent, known)
        wrapper = _wrapper_attribute(owner)
        if component == wrapper:
            known[raw] = clean, getattr(owner, wrapper)
        else:  # A wrapper may leave its attribute out of the names of what it wraps.
            inner = getattr(owner, wrapper) if wrapper else owner
            known[raw] = [*clean, component], getattr(inner, component, None)
    return known[raw]


def _wrapper_attribute(module: Any) -> str:
    """Return the attribute in which `module` holds the module that it wraps; empty if it is no wrapper."""
    if isinstance(module, DistributedDataParallel):
        return "module"
    if isinstance(module, FullyShardedDataParallel):
        return WRAPPED_BY_FSDP1
    # Looked for by name first: each save looks at every module of the model.
    return COMPILED if COMPILED in getattr(module, "_modules", ()) and is_compiled(module) else ""


# Makes `load_state_dict` safe over tensors that were read in place.
#
# A load reads into the tensors that `state_dict` returned, and most of these are views of live ones. `Tensor.copy_`
# does nothing if source and target are the same view, so `load_state_dict` with all of them costs nothing. But a load
# hook may put the memory of one live tensor under another name (a swap), and a copy from memory that is being
# overwritten would mix the two. Such a view is cloned first, after all hooks of the module.


@contextmanager
def no_mixing(root: nn.Module) -> Iterator[None]:
    """Within this context, keep `root.load_state_dict` from copying one live tensor into another while both change."""
    rewriting = {id(each): each for each in root.modules() if loads_in_its_own_way(each) or has_load_hooks(each)}
    named = chain(root.named_parameters(remove_duplicate=False), root.named_buffers(remove_duplicate=False))
    live = dict(named) if rewriting else {}
    storages = {storage_of(tensor) for tensor in live.values()} - {0}

    def clone_strays(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Clone the entries that are live memory of another name. Runs as the last load hook of `module`."""
        for key, value in state_dict.items():
            if isinstance(value, torch.Tensor) and key.startswith(prefix) and storage_of(value) in storages:
                state_dict[key] = value if _is_same_view(value, live.get(key)) else value.clone()

    handles = [
        module.register_load_state_dict_pre_hook(clone_strays)  # type: ignore[no-untyped-call]  # torch's is not typed
        for module in rewriting.values()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_same_view(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    if b is None or not has_same_form(a, b):
        return False
    a, b = local_of(a), local_of(b)
    return (a.stride(), a.data_ptr()) == (b.stride(), b.data_ptr())


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of the memory of `tensor` on this rank; 0 if it has none."""
    try:
        return local_of(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        # Wrapper subclasses over other tensors have no memory of their own.
        return 0
