"""Sums and maxima of scalars over ranks. **Collective**; without a process group, the value itself.

A rank without a value (only the last stage of a pipeline has a loss) passes None, takes part, and gets the result like
all others.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.distributed.groups import world_size


def mean_over_ranks(value: Tensor | None, device: torch.device | None = None) -> Tensor:
    """Return the mean of a scalar over the ranks that have one; not finite if the value of any rank is not.

    `device` is where the values are, for a rank without one.
    """
    mine = torch.zeros(2, device=device) if value is None else torch.stack([value.detach(), torch.ones_like(value)])
    sum_and_count = _reduce(mine, dist.ReduceOp.SUM)
    return sum_and_count[0] / sum_and_count[1]


def max_over_ranks(value: Tensor | None, device: torch.device | None = None) -> Tensor:
    """Return the maximum of a scalar over the ranks that have one."""
    mine = torch.tensor(-math.inf, device=device) if value is None else value.detach().clone()
    return _reduce(mine, dist.ReduceOp.MAX)


def norm_over_group(norm: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the norm of all tensors of `group`, from the `norm` of each rank's own. **Collective** over `group`."""
    squares = norm.double().square()  # The square of a float32 may overflow float32.
    dist.all_reduce(squares, group=group)
    return squares.sqrt().to(norm.dtype)


def _reduce(values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    if world_size() > 1:
        dist.all_reduce(values, op=op)
    return values
