"""How far the values of two stored tensors are apart, with memory for some slices of each, not for a tensor.

Tensors may be cut in different ways, and have different dtypes. Bytes are compared first; only a part that differs is
converted to float64, so equal checkpoints need no torch. NaN equals NaN, and an infinity the same infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from torchtitan_lite.examining.opened import OpenedCheckpoint
from torchtitan_lite.examining.tensor_stream import TensorStream

if TYPE_CHECKING:
    import torch

_SLICE_ELEMENTS = 2 << 20
"""Read, and if they differ converted to float64, at a time."""
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_WIDE = ("int64", "uint64")
"""Dtypes with values that float64 does not have."""


@dataclass(frozen=True)
class ValueDifference:
    """How two tensors of the same shape differ."""

    is_bitwise_equal: bool
    max_abs: float = 0.0
    """The largest distance of two elements; NaN if exactly one of two elements is NaN."""
    num_different: int = 0
    """Elements that are not equal as numbers."""

    def exceeds(self, atol: float) -> bool:
        """Return whether the tensors differ by more than `atol`; 0 asks for the same bits."""
        return not self.is_bitwise_equal and not (atol > 0 and self.max_abs <= atol)

    def __add__(self, other: ValueDifference) -> ValueDifference:
        largest = math.nan if math.isnan(self.max_abs + other.max_abs) else max(self.max_abs, other.max_abs)
        is_equal = self.is_bitwise_equal and other.is_bitwise_equal
        return ValueDifference(is_equal, largest, self.num_different + other.num_different)


EQUAL = ValueDifference(True)


def compare_values(
    a: OpenedCheckpoint, b: OpenedCheckpoint, keys: Iterable[str], on_bytes: Callable[[int], None] = lambda count: None
) -> Iterator[tuple[str, ValueDifference]]:
    """Yield how each tensor of `keys`, which has the same shape in both checkpoints, differs.

    `on_bytes` receives the bytes read since its last call. Raises as `TensorStream` does.
    """
    stream_a, stream_b = (TensorStream(each.folder, each.contents, each.records) for each in (a, b))
    for key in keys:
        dtype_a, dtype_b = a.contents.tensors[key].dtype, b.contents.tensors[key].dtype
        found = ValueDifference(str(dtype_a) == str(dtype_b))
        pairs = zip(stream_a.slices(key, _SLICE_ELEMENTS), stream_b.slices(key, _SLICE_ELEMENTS), strict=True)
        for data_a, data_b in pairs:
            found += _of_elements(data_a, data_b, str(dtype_a), str(dtype_b))
            on_bytes(len(data_a) + len(data_b))
        yield key, found


def _of_elements(a: memoryview, b: memoryview, dtype_a: str, dtype_b: str) -> ValueDifference:
    if dtype_a == dtype_b and np.array_equal(np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)):
        return EQUAL
    if dtype_a == dtype_b and dtype_a in _WIDE:
        return _of_integers(a, b, dtype_a)
    x, y = _as_doubles(a, dtype_a), _as_doubles(b, dtype_b)
    differ = (x != y) & ~(x.isnan() & y.isnan())
    distances = (x[differ] - y[differ]).abs()
    return ValueDifference(False, float(distances.max()) if len(distances) else 0.0, len(distances))


def _of_integers(a: memoryview, b: memoryview, dtype: str) -> ValueDifference:
    x, y = np.frombuffer(a, dtype), np.frombuffer(b, dtype)
    differ = x != y
    larger, smaller = np.maximum(x, y)[differ].astype(np.uint64), np.minimum(x, y)[differ].astype(np.uint64)
    # Modulo 2^64 the difference of two 64-bit integers is right even where it does not fit into int64.
    return ValueDifference(False, float((larger - smaller).max(initial=0)), int(differ.sum()))


def _as_doubles(data: memoryview, dtype: str) -> torch.Tensor:
    """Return the elements as float64 or complex128."""
    import torch  # seconds, and only where bytes differ

    if dtype == "float4_e2m1fn_x2":
        codes = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        both = torch.stack((codes & 15, codes >> 4), dim=1).long()
        return _float4()[both].reshape(-1)
    if dtype == "complex32":
        halves = torch.frombuffer(bytearray(data), dtype=torch.float16).double().reshape(-1, 2)
        return torch.view_as_complex(halves)
    elements = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
    if elements.is_complex():
        return elements.to(torch.complex128)
    return (elements.float() if dtype.startswith("float8") else elements).double()


@cache
def _float4() -> torch.Tensor:
    import torch  # as above

    return torch.tensor([*_FLOAT4, *(-value for value in _FLOAT4)], dtype=torch.float64)
