"""The tensors of a checkpoint whose bytes have neither digest nor checksum: each is read once, and checked for NaN.

Those of safetensors files. A file that cannot be read is found, and a tensor with NaN is named; any other wrong byte
looks like a right one. Memory: two slices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.examining.file_digests import OnBytes
from torchtitan_lite.examining.tensor_stream import TensorStream
from torchtitan_lite.store.place import Place

_NATIVE: dict[str, np.dtype[Any]] = {"float64": np.dtype("<f8"), "float32": np.dtype("<f4")}
_ABOVE_INFINITY: dict[str, tuple[str, int, int]] = {
    "float16": ("u2", 0x7FFF, 0x1F << 10),
    "bfloat16": ("u2", 0x7FFF, 0xFF << 7),
    "float8_e5m2": ("u1", 0x7F, 0x1F << 2),
    "float8_e4m3fn": ("u1", 0x7F, 0x7E),
}
"""By dtype that no processor adds: the integer of its size, the mask of all but the sign, and the largest value that is
no NaN."""


def nan_in(folder: Place, contents: Contents, on_bytes: OnBytes) -> list[str]:
    """Return the keys of those in which NaN is. Raises `CheckpointDamaged` and `CheckpointUnreadable`."""
    stream, found = TensorStream(folder, contents, {}), []
    for key, tensor in contents.tensors.items():
        if any(chunk.item is not None for chunk in tensor.chunks):
            continue
        has_nan = finder(str(tensor.dtype))
        is_found = False
        for each in stream.slices(key):
            is_found = is_found or has_nan(each)
            on_bytes(len(each))
        if is_found:
            found.append(key)
    return found


def finder(dtype: str) -> Callable[[bytes | memoryview], bool]:
    """Return what finds NaN among elements of `dtype`; nothing for dtypes without it."""
    if dtype in _NATIVE:
        return lambda data: _has_nan(np.frombuffer(data, _NATIVE[dtype]))
    if dtype not in _ABOVE_INFINITY:
        return lambda data: False
    integer, mask, infinity = _ABOVE_INFINITY[dtype]
    kind = np.dtype(f"<{integer}")
    return lambda data: bool(((np.frombuffer(data, kind) & kind.type(mask)) > kind.type(infinity)).any())


def _has_nan(elements: npt.NDArray[Any]) -> bool:
    # A maximum is NaN if any element is, and takes a third of the time of a look at each.
    with np.errstate(invalid="ignore"):
        return bool(np.isnan(elements.max(initial=0)))
