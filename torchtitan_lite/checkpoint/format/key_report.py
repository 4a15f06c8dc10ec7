"""The differences between a checkpoint and the run that loads it, key by key.

Every refusal of a load prints this report: keys that are missing, unexpected, or of another shape or dtype.
It is made from names, shapes and dtypes alone, before any data is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torchtitan_lite.checkpoint.format.chunk_runs import StoredTensor
from torchtitan_lite.checkpoint.format.flattening import is_expanded
from torchtitan_lite.checkpoint.format.shards import PLAIN_TENSORS
from torchtitan_lite.checkpoint.format.tensor_table import TensorKind

TensorLike = torch.Tensor | StoredTensor | TensorKind
"""Has the shape and the dtype of a tensor: one in memory, or in a checkpoint whose dtypes are torch's."""
SHOWN = 8
"""Keys listed under each heading; the others are counted."""


@dataclass(frozen=True)
class KeyReport:
    """The differences; false if there are none."""

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    mismatched: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        mismatched = [f"{key}: {what}" for key, what in self.mismatched.items()]
        return "\n".join(
            [
                *_listed_keys("missing in the checkpoint", self.missing),
                *_listed_keys("unexpected in the checkpoint", self.unexpected),
                *_listed_keys("different", mismatched),
            ]
        )


def compare_tensors(
    expected: Mapping[str, TensorLike], found: Mapping[str, TensorLike], *, cast: bool = False
) -> KeyReport:
    """Return how `found` differs from `expected`; with `cast` another floating-point dtype is not a difference."""
    missing: list[str] = []
    mismatched: dict[str, str] = {}
    for key, own in expected.items():
        other = found.get(key)
        if other is None:
            missing.append(key)
        elif own.dtype is other.dtype and own.shape == other.shape and _is_in_a_row(own):
            continue  # Of thousands of tensors nearly all end here.
        elif what := _tensor_difference(own, other, cast):
            mismatched[key] = what
    return KeyReport(missing, [key for key in found if key not in expected], mismatched)


def merged(*reports: KeyReport) -> KeyReport:
    """Return all of `reports` as one."""
    return KeyReport(
        missing=[key for report in reports for key in report.missing],
        unexpected=[key for report in reports for key in report.unexpected],
        mismatched={key: what for report in reports for key, what in report.mismatched.items()},
    )


def _is_in_a_row(tensor: TensorLike) -> bool:
    """Return whether `tensor` is known to have elements in a row, so that none of them share memory."""
    if not isinstance(tensor, torch.Tensor) or type(tensor) not in PLAIN_TENSORS:
        return False
    return tensor.is_contiguous() and tensor.numel() > 0


def _tensor_difference(expected: TensorLike, found: TensorLike, cast: bool) -> str:
    differences = []
    if tuple(expected.shape) != tuple(found.shape):
        differences.append(f"shape {list(found.shape)} in the checkpoint, {list(expected.shape)} expected")
    may_cast = cast and expected.dtype.is_floating_point and found.dtype.is_floating_point
    if expected.dtype != found.dtype and not may_cast:
        differences.append(f"dtype {found.dtype} in the checkpoint, {expected.dtype} expected")
    if isinstance(expected, torch.Tensor) and is_expanded(expected):
        differences.append("expanded here, so nothing can be loaded into it: give it memory of its own, .clone()")
    return "; ".join(differences)


def _listed_keys(title: str, keys: Sequence[str]) -> list[str]:
    if not keys:
        return []
    rest = [f"    ... and {len(keys) - SHOWN} more"] if len(keys) > SHOWN else []
    return [f"  {title} ({len(keys)}):", *(f"    {key}" for key in keys[:SHOWN]), *rest]
