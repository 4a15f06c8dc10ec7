"""Finds NaN in the weights of a checkpoint from a sample of them.

A loss that became NaN is in nearly all weights after one step, so a small part of each tensor shows it,
for a hundredth of the work of a check of every element. The sample is all of a tensor of up to
`_MAX_ELEMENTS`, both ends of a larger one, and of more than `_MAX_TENSORS` tensors an even choice.
Infinity is no finding: attention masks are made of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.planner import WriteItem
from torch.nn.utils import get_total_norm

_MAX_ELEMENTS = 4096
_MAX_TENSORS = 1024


@torch.no_grad()
def names_with_nan(items: Sequence[WriteItem], tensors: Sequence[torch.Tensor], prefix: str) -> list[str]:
    """Return the keys under `prefix` of those `tensors` whose sample holds NaN; `items` describe them. Any rank."""
    dtypes = [tensor.dtype for tensor in tensors]
    sampled = {dtype for dtype in {*dtypes} if dtype.is_floating_point and dtype.itemsize > 1}
    # Numbers, not pairs: of thousands of new pairs the garbage collector would take more time than all else here.
    floating = [
        number
        for number, (item, dtype) in enumerate(zip(items, dtypes, strict=True))
        if dtype in sampled and item.index.fqn.startswith(prefix)
    ]
    samples: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor]]] = {}
    for number in floating[:: -(-len(floating) // _MAX_TENSORS) or 1]:
        for part in _parts(tensors[number].detach()):
            samples.setdefault((part.dtype, part.device), []).append((items[number].index.fqn, part))
    found: dict[str, None] = {}
    for of_a_kind in samples.values():
        # A norm is NaN if one element is, and one call computes that of all; which they are matters only then.
        if get_total_norm([part for _, part in of_a_kind]).isnan():
            found |= dict.fromkeys(name for name, part in of_a_kind if part.isnan().any())
    return [*found]


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return all of `tensor`, or both ends of a large one."""
    if tensor.numel() <= _MAX_ELEMENTS:
        return [tensor] if tensor.numel() else []
    first = last = tensor
    while first.numel() > _MAX_ELEMENTS and first.dim() > 1:
        first, last = first[0], last[-1]
    return [first[:_MAX_ELEMENTS], last[-_MAX_ELEMENTS:]]
