"""How far the values of one rank are from those of another, in one number a tensor, and in words. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from torchtitan_lite.checkpoint.planning.replicated import SHOWN

# Far above what reductions in another order leave, and far below what two steps on other data make of optimizer states.
LIMIT = 1e-2
"""The relative L2 difference of a tensor that is no longer one of rounding: 2 to 3 decimal digits, as bfloat16 has."""


class Distance(NamedTuple):
    """How far this rank's values of `key` are from those of the rank `lowest`."""

    key: str
    lowest: int
    rank: int
    relative: float
    """The L2 norm of the difference over the larger of the two norms; inf where one of them is not finite."""


def joint_distances(per_rank: list[list[Distance]]) -> list[tuple[str, bool]]:
    """Return for each rank what all of them found, in words, and whether some of it is far; only that is named then."""
    found = sorted((each for of_rank in per_rank for each in of_rank), key=lambda each: -each.relative)
    far = [each for each in found if not each.relative <= LIMIT]  # So NaN is far, too.
    by_key: dict[str, list[Distance]] = {}
    for each in far or found:
        by_key.setdefault(each.key, []).append(each)
    named = [
        f"{key} ({'rank' if len(of_key) == 1 else 'ranks'} {', '.join(str(each.rank) for each in of_key[:SHOWN])} "
        f"and rank {of_key[0].lowest}, relative difference {of_key[0].relative:.2g})"
        for key, of_key in [*by_key.items()][:SHOWN]
    ]
    more = len(by_key) - len(named)
    return [(", ".join(named) + (f" and {more} more" if more else ""), bool(far))] * len(per_rank)


def squares(mine: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> tuple[float, float, float]:
    """Return the squared L2 norms of the difference and of both tensors, which come as bytes of `dtype`."""
    a, b = _as_float64(mine, dtype), _as_float64(theirs, dtype)
    is_same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(is_same, 0.0, a - b)
    norms = [float(torch.where(each.isfinite(), each, 0.0).square().sum()) for each in (a, b)]
    return float(difference.square().sum()), norms[0], norms[1]


def _as_float64(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements whose bytes are `data`; the bytes themselves for a packed dtype, which has no arithmetic."""
    values = data.view(dtype)
    try:
        return (torch.view_as_real(values) if dtype.is_complex else values).double()
    except NotImplementedError:
        return data.double()


def relative(difference: float, mine: float, theirs: float) -> float:
    if difference == 0.0:
        return 0.0
    largest = max(mine, theirs)
    return math.sqrt(difference / largest) if largest and math.isfinite(difference) else math.inf
