"""Elements of one dtype as another one, slice by slice. Imports torch where it casts."""

from __future__ import annotations

from functools import cache
from typing import Any

from torchtitan_lite.examining.tensor_stream import SLICE_BYTES

FLOATING = ("float32", "float16", "bfloat16", "float64")
"""The dtypes that are cast from and to. Float8 needs scales that are not stored next to the elements."""


class Cast:
    """Casts elements from the dtype `before` to the dtype `after`, as `tensor.to` does. One thread at a time."""

    def __init__(self, before: str, after: str) -> None:
        import torch

        self._before: torch.dtype = getattr(torch, before)
        self._after: torch.dtype = getattr(torch, after)
        self._room: torch.Tensor = torch.empty(0, dtype=self._after)
        self.most_elements = SLICE_BYTES // max(self._before.itemsize, self._after.itemsize)
        """In one call, so that neither the elements nor the cast ones are larger than a slice."""

    def __call__(self, data: memoryview) -> memoryview:
        """Return the elements of `data`, cast; valid until the next call."""
        import torch

        elements = torch.frombuffer(data, dtype=self._before)
        if len(self._room) < len(elements):
            self._room = torch.empty(len(elements), dtype=self._after)
        room = self._room[: len(elements)]
        room.copy_(elements)
        cast: Any = room.view(torch.uint8).numpy()
        view: memoryview = cast.data
        return view


@cache
def cast_between(before: str, after: str) -> Cast | None:
    """Return the cast of a tensor of the dtype `before` if `after` is wanted; None for a tensor that stays as it is.

    There is one of these dtypes: each keeps memory for a slice.
    """
    return None if not after or before == after or before not in FLOATING else Cast(before, after)
