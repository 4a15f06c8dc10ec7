"""The dtypes of stored tensors, without torch.

Contents that nothing computes with have these; where tensors are loaded, `torch_contents.DTYPES` has torch's in place
of them. Both have an `itemsize`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """A dtype by its name in torch; an element takes `itemsize` bytes."""

    # Not a tuple: a pickle may hold an equal tuple, and none may pass for a dtype.
    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


_NAMES_BY_BYTES = {
    1: (
        *("bool", "int8", "uint8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        *("float8_e8m0fnu", "float4_e2m1fn_x2"),
    ),
    2: ("int16", "uint16", "float16", "bfloat16"),
    4: ("int32", "uint32", "float32", "complex32"),
    8: ("int64", "uint64", "float64", "complex64"),
    16: ("complex128",),
}

DTYPES = {name: Dtype(name, itemsize) for itemsize, names in _NAMES_BY_BYTES.items() for name in names}
"""The dtypes, by name, whose elements are whole bytes and need no other data to be understood."""


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype, torch's or one of these."""
    return str(dtype).removeprefix("torch.")
