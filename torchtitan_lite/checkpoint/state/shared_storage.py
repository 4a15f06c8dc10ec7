"""Tensors of an optimizer that share memory: a step counter of all parameters, a table under many names.

A change of one is a change of all, so tensors that came back apart would make another run. A checkpoint has each of
them in full, and `shared.<fqn>` has pairs of keys: a tensor, and the first one with the same memory. A load reads both
into one tensor. Tensors that overlap without being the same cannot come back so, and are refused by name.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.format.flattening import named_tensors
from torchtitan_lite.checkpoint.format.shards import has_same_form, local_of

SHARED = "shared"
"""The kind of the keys."""
Pairs = tuple[tuple[str, str], ...]
_IS_THE_SAME = (
    "so a resume would make two tensors of one. Keep a clone in one of the two places, or the tensor in only one."
)


class NamedTensor(NamedTuple):
    """A tensor of an optimizer, or a parameter, under its name in a checkpoint."""

    key: str
    tensor: torch.Tensor
    owner: str
    """The parameter's name; empty if the tensor cannot be joined with another one at a load."""


def tensors_below(key: str, value: Any, owner: str) -> Iterator[NamedTensor]:
    """Yield the tensors in nested dicts, lists and tuples. A tuple is one object of a checkpoint."""
    for name, tensor, is_in_tuple in named_tensors(value, key):
        yield NamedTensor(name, tensor, "" if is_in_tuple else owner)


@torch.no_grad()  # Where `to_local` returns the memory itself.
def may_share(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether two of `tensors` may have bytes in common. Rarely so, and found out 20 times as fast as which."""
    begins, sizes = [], []
    try:
        for tensor in tensors:
            local = tensor.to_local() if type(tensor) is DTensor else tensor
            begins.append(local.data_ptr())
            sizes.append(local.nbytes)
    except RuntimeError:
        # Of a kind of tensor without an address, or without a size in bytes.
        return True
    first, size = np.array(begins, dtype=np.uint64), np.array(sizes, dtype=np.uint64)
    has_bytes = (first > 0) & (size > 0)
    first, size = first[has_bytes], size[has_bytes]
    order = np.argsort(first)
    first, end = first[order], (first + size)[order]
    return bool((end[:-1] > first[1:]).any())


@torch.no_grad()  # As above.
def shared_pairs(held: Iterable[NamedTensor], parameters: Mapping[str, torch.Tensor]) -> dict[str, Pairs]:
    """Return by parameter which tensors of `held` are others under a second name, with the first name of each.

    Raises TypeError for tensors that overlap in another way, also with `parameters`.
    """
    first: dict[int, tuple[NamedTensor, int]] = {}
    pairs: dict[str, list[tuple[str, str]]] = {}
    for entry in held:
        place = _memory_range(entry.tensor)
        if place is None:
            continue
        begin, end = place
        before, before_end = first.setdefault(begin, (entry, end))
        if before is entry:
            continue
        if not (before.owner and entry.owner and end == before_end and _has_same_layout(entry.tensor, before.tensor)):
            raise _overlap(entry.key, before.key)
        pairs.setdefault(entry.owner, []).append((entry.key, before.key))
    _refuse_overlaps(first, parameters)
    return {owner: tuple(found) for owner, found in pairs.items()}


def join_targets(targets: dict[str, Any], pairs: object) -> None:
    """Put one tensor in place of two in `targets`, by flat key, for each of the stored `pairs` that fits."""
    for pair in pairs if isinstance(pairs, tuple) else ():
        if not (isinstance(pair, tuple) and len(pair) == 2):
            continue
        key, first = (targets.get(f"optimizer.{name}") for name in pair)
        if isinstance(key, torch.Tensor) and isinstance(first, torch.Tensor) and has_same_form(key, first):
            targets[f"optimizer.{pair[0]}"] = first


def _refuse_overlaps(first: Mapping[int, tuple[NamedTensor, int]], parameters: Mapping[str, torch.Tensor]) -> None:
    begins = sorted(first)
    last_end, last_key = 0, ""
    for begin in begins:
        entry, end = first[begin]
        if begin < last_end:
            raise _overlap(entry.key, last_key)
        last_end, last_key = end, entry.key
    for name, parameter in parameters.items():
        place = _memory_range(parameter)
        at = bisect_right(begins, place[1] - 1) if place is not None else 0
        if place is not None and at > 0:
            entry, end = first[begins[at - 1]]
            if end > place[0]:
                raise _overlap(entry.key, f"the parameter {name}")


def _memory_range(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the first byte of `tensor` and the one behind it; None if it has none, or gaps between its elements."""
    local = local_of(tensor)
    if local.layout is not torch.strided or local.numel() == 0:
        return None
    if not local.is_contiguous() and not torch.ops.aten.is_non_overlapping_and_dense(local):
        return None
    try:
        begin = local.data_ptr()
    except RuntimeError:
        # A wrapper subclass over other tensors; the save refuses it.
        return None
    return (begin, begin + local.numel() * local.itemsize) if begin else None


def _has_same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not has_same_form(a, b):
        return False
    a, b = local_of(a), local_of(b)
    return a.stride() == b.stride() and a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg()


def _overlap(key: str, other: str) -> TypeError:
    what = other if other.startswith("the parameter") else f"optimizer.{other}"
    return TypeError(f"optimizer.{key} and {what} share memory, {_IS_THE_SAME}")
