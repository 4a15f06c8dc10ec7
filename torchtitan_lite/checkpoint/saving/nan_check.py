"""Finds NaN in the weights and the optimizer states of a checkpoint from a sample of each.

A loss that became NaN is in nearly all of them after one step, so a small part of each tensor shows it,
for a hundredth of the work of a check of every element. The sample is all of a tensor of up to
`_MAX_ELEMENTS`, both ends of a larger one, and of more than `_MAX_TENSORS` tensors an even choice.
In weights infinity is no finding: attention masks are made of it. In an optimizer's tensors it is one, because no
later step ends it; but not in its single numbers, such as a lowest loss that begins at infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed.checkpoint.planner import WriteItem
from torch.nn.utils import get_total_norm

OPTIMIZER = "optimizer."
"""With this the keys of optimizer states begin."""

_MAX_ELEMENTS = 4096
_MAX_TENSORS = 1024


@torch.no_grad()
def names_with_nan(items: Sequence[WriteItem], tensors: Sequence[torch.Tensor], prefix: str) -> list[str]:
    """Return the keys of those `tensors` whose sample holds what it must not; `items` describe them. Any rank.

    These are the weights, whose keys begin with `prefix`, and the optimizer states.
    """
    dtypes = [tensor.dtype for tensor in tensors]
    sampled = {dtype for dtype in {*dtypes} if dtype.is_floating_point and dtype.itemsize > 1}
    # Numbers, not pairs: of thousands of new pairs the garbage collector would take more time than all else here.
    weights: list[int] = []
    moments: list[int] = []
    for number, (item, dtype) in enumerate(zip(items, dtypes, strict=True)):
        if dtype in sampled:
            if item.index.fqn.startswith(prefix):
                weights.append(number)
            elif item.index.fqn.startswith(OPTIMIZER) and tensors[number].dim():
                moments.append(number)
    return [*_found(items, tensors, weights, torch.isnan), *_found(items, tensors, moments, _is_not_finite)]


def _found(
    items: Sequence[WriteItem],
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[int],
    is_wrong: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, None]:
    samples: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor]]] = {}
    for number in numbers[:: -(-len(numbers) // _MAX_TENSORS) or 1]:
        for part in _parts(tensors[number].detach()):
            samples.setdefault((part.dtype, part.device), []).append((items[number].index.fqn, part))
    found: dict[str, None] = {}
    for of_a_kind in samples.values():
        # A norm is wrong if one element is, and one call computes that of all; which they are matters only then.
        if is_wrong(get_total_norm([part for _, part in of_a_kind])):
            found |= dict.fromkeys(name for name, part in of_a_kind if is_wrong(part).any())
    return found


def _is_not_finite(tensor: torch.Tensor) -> torch.Tensor:
    return ~tensor.isfinite()


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return all of `tensor`, or both ends of a large one."""
    if tensor.numel() <= _MAX_ELEMENTS:
        return [tensor] if tensor.numel() else []
    first = last = tensor
    while first.numel() > _MAX_ELEMENTS and first.dim() > 1:
        first, last = first[0], last[-1]
    return [first[:_MAX_ELEMENTS], last[-_MAX_ELEMENTS:]]
