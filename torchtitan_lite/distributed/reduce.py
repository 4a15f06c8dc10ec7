"""Sums and maxima of scalars over ranks. **Collective**; without a process group the value itself."""

from __future__ import annotations

import torch
import torch.distributed as dist


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Mean of a scalar tensor over all ranks; not finite on any rank means not finite on every rank."""
    return _reduce(value, dist.ReduceOp.SUM) / _world_size()


def max_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Maximum of a scalar tensor over all ranks."""
    return _reduce(value, dist.ReduceOp.MAX)


def broadcast_from_first(value: int, device: torch.device) -> int:
    """The first rank's `value`, on every rank."""
    tensor = torch.tensor(value, dtype=torch.int64, device=device)
    if _world_size() > 1:
        dist.broadcast(tensor, src=0)
    return int(tensor.item())


def _reduce(value: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    result = value.detach().clone()
    if _world_size() > 1:
        dist.all_reduce(result, op=op)
    return result


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
