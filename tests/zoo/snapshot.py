"""Snapshots of a run's state, as plain values and the ranks' own memory, and their differences.

Nothing here uses the package, or DTensor to get a whole tensor: if sizes do not divide, DTensor computes other rows for
a rank than `fully_shard` gives it, and the tests check exactly that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

WRAPPERS_INSIDE = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor of `shape`, cut along each (dim, parts, index) of `cuts` in turn."""

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, int, int], ...]
    memory: Tensor

    @staticmethod
    def of(tensor: Tensor) -> Piece:
        """Return this rank's part of `tensor`."""
        if not isinstance(tensor, DTensor):
            return Piece(tuple(tensor.shape), (), tensor.detach().clone())
        mesh = tensor.device_mesh
        # A _StridedShard comes from FSDP, which cuts the rows that tensor parallelism has already cut.
        in_order = sorted(enumerate(tensor.placements), key=lambda each: hasattr(each[1], "split_factor"))
        cuts = [(p.dim, mesh.size(at), mesh.get_local_rank(at)) for at, p in in_order if hasattr(p, "dim")]
        return Piece(tuple(tensor.shape), tuple(cuts), tensor.to_local().detach().clone())

    def cut(self, whole: Tensor) -> Tensor:
        """Return this piece's part of `whole`."""
        for dim, parts, index in self.cuts:
            chunks = whole.chunk(parts, dim)
            whole = chunks[index] if index < len(chunks) else whole.narrow(dim, 0, 0)
        return whole


def assembled(pieces: Sequence[Any]) -> Any:
    """Return one nest from those of all ranks, with whole tensors; values that are no pieces come from rank 0."""
    first = pieces[0]
    if isinstance(first, Piece):
        whole = torch.zeros(first.shape, dtype=first.memory.dtype)
        numbers = torch.arange(whole.numel()).view(first.shape)
        for piece in pieces:
            whole.view(-1)[piece.cut(numbers).reshape(-1)] = piece.memory.reshape(-1)
        return whole
    if isinstance(first, dict):
        keys = list(dict.fromkeys(key for each in pieces for key in each))
        made = {key: assembled([each[key] for each in pieces if key in each]) for key in keys}
        return made if type(first) is dict else type(first)(made)
    if type(first) in (list, tuple):
        return type(first)([assembled(items) for items in zip(*pieces, strict=True)])
    return first


def in_pieces(value: Any) -> Any:
    """Return a copy of a nest with a Piece for each tensor."""
    if isinstance(value, Tensor):
        return Piece.of(value)
    if isinstance(value, dict):
        made = {key: in_pieces(inner) for key, inner in value.items()}
        return made if type(value) is dict else type(value)(made)
    if isinstance(value, list | tuple):
        return type(value)([in_pieces(inner) for inner in value]) if type(value) in (list, tuple) else value
    return value


def difference(expected: Any, found: Any, where: str = "") -> str:
    """Return the first difference of two nests; empty if they are equal bit for bit and in their types."""
    if isinstance(found, Piece) and isinstance(expected, Tensor):  # the whole tensor
        return difference(found.cut(expected), found.memory, where)
    if type(expected) is not type(found):
        return f"{where}: expected {_short(expected)}, found {_short(found)}"
    if isinstance(expected, Piece):
        return difference(expected.memory, found.memory, where)
    if isinstance(expected, Tensor):
        return "" if _same_bits(expected, found) else f"{where}: expected {_short(expected)}, found {_short(found)}"
    if isinstance(expected, dict):
        if set(map(_typed, expected)) != set(map(_typed, found)):
            return f"{where}: expected keys {_short(list(expected))}, found {_short(list(found))}"
        return next(filter(None, (difference(expected[key], found[key], f"{where}.{key}") for key in expected)), "")
    if isinstance(expected, list | tuple):
        if len(expected) != len(found):
            return f"{where}: expected {len(expected)} items, found {len(found)}"
        pairs = zip(expected, found, strict=True)
        return next(filter(None, (difference(a, b, f"{where}[{at}]") for at, (a, b) in enumerate(pairs))), "")
    if isinstance(expected, set | frozenset):  # Equal sets may differ in order.
        return difference(sorted(map(_typed, expected), key=repr), sorted(map(_typed, found), key=repr), where)
    return "" if repr(expected) == repr(found) else f"{where}: expected {_short(expected)}, found {_short(found)}"


def plain_names(module: nn.Module, named: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    """Return `named`, the named tensors of `module`, under the names of the model that it wraps."""
    plain = {}
    for name, value in named:
        for inside in WRAPPERS_INSIDE:
            name = name.replace(inside, "")
        plain[name.removeprefix("module.") if isinstance(module, DistributedDataParallel) else name] = value
    return plain


def model_state(module: nn.Module) -> dict[str, Any]:
    """Return the parameters, the persistent buffers and the extra state of a model."""
    persistent = {
        f"{prefix}.{name}" if prefix else name
        for prefix, each in module.named_modules()
        for name in each._buffers.keys() - each._non_persistent_buffers_set
    }
    buffers = ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)
    extra = (
        (f"{name}._extra_state", each.get_extra_state())
        for name, each in module.named_modules()
        if type(each).get_extra_state is not nn.Module.get_extra_state
    )
    return {
        "parameters": plain_names(module, module.named_parameters()),
        "buffers": plain_names(module, buffers),
        "extra": plain_names(module, extra),
    }


def optimizer_state(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return the state and the settings of each parameter, by its name.

    A parameter of which FSDP1 has no element on this rank gets no state: some optimizers make empty state for it.
    """
    is_flat = isinstance(module, FullyShardedDataParallel)
    names = {parameter: name for name, parameter in plain_names(module, module.named_parameters()).items()}
    state, settings = {}, {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                is_elsewhere = is_flat and parameter.numel() == 0
                state[names[parameter]] = {} if is_elsewhere else dict(optimizer.state.get(parameter, {}))
                settings[names[parameter]] = {key: value for key, value in group.items() if key != "params"}
    return {"state": {name: state[name] for name in sorted(state)}, "settings": settings}


def of_flat_pieces(module: FullyShardedDataParallel, held: dict[str, Any]) -> tuple[Any, Any]:
    """Return the whole parameters and optimizer states, by name, from `held`, this rank's part. **Collective**.

    FSDP1 cuts a parameter in the order of its memory, so concatenating the ranks' pieces gives the whole. torch's full
    state dict cannot be used: on CPUs it has all states of a parameter in the same memory (torch 2.13).
    """
    with FullyShardedDataParallel.summon_full_params(module, writeback=False):
        shapes = {name: each.shape for name, each in plain_names(module, module.named_parameters()).items()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (held["model"]["parameters"], held["optimizer"]["state"]))

    def joined(shape: torch.Size, pieces: Sequence[Piece]) -> Piece:
        memory = pieces[0].memory if not pieces[0].shape else torch.cat([each.memory for each in pieces]).view(shape)
        return Piece.of(memory)

    parameters, states = {}, {}
    for name, shape in shapes.items():
        parameters[name] = joined(shape, [own[name] for own, _ in ranks])
        having = [own[name] for _, own in ranks if own[name]]
        states[name] = {key: joined(shape, [own[key] for own in having]) for key in (having or [{}])[0]}
    return parameters, {name: states[name] for name in sorted(states)}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def _typed(key: Any) -> tuple[str, str]:
    return type(key).__name__, repr(key)


def _short(value: Any) -> str:
    text = " ".join((f"{list(value.shape)} " if isinstance(value, Tensor) else "").split()) + repr(value)
    text = " ".join(text.split())
    return f"{type(value).__name__} {text if len(text) < 160 else text[:157] + '...'}"
