"""Names that do not depend on how a run is parallelised.

A name here is the plain model's FQN, without prefixes of DDP, FSDP, compilation or activation
checkpointing. Every key of a checkpoint with a parameter's name in it uses these, so the model parts of
one rank (pipeline stages) must not share a name. A key that a state-dict hook made need not be an
attribute of any module; it stays as it is from the first unknown component on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.torch_private import COMPILED, WRAPPED_BY_FSDP1, WRAPPED_FOR_RECOMPUTING, is_compiled

EXTRA_STATE = "_extra_state"
"""Last component of the key under which `get_extra_state` of a module is saved."""
SHOWN = 4


def clean_names(module: nn.Module, raw_names: Iterable[str]) -> dict[str, str]:
    """Return the plain name of each of `raw_names`, which are keys of `module`'s state dict or names of parameters."""
    known: dict[str, tuple[list[str], Any]] = {"": ([], module)}
    return {raw: ".".join(_walked(raw.replace(WRAPPED_FOR_RECOMPUTING, ""), known)[0]) for raw in raw_names}


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
        raw = dict(part.named_parameters(remove_duplicate=False))
        own = dict(zip(clean_names(part, raw).values(), raw.values(), strict=True))
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
