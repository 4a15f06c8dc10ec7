"""The content of a checkpoint that is about to be written: tensors of a stored one, and small objects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

from torchtitan_lite.checkpoint.examining.tensor_stream import SLICE_BYTES
from torchtitan_lite.checkpoint.format import plain_value
from torchtitan_lite.checkpoint.format.structure import Path as KeyPath
from torchtitan_lite.checkpoint.format.torch_item import object_item


class NewTensor(NamedTuple):
    """A tensor of the new checkpoint, and the stored one that it comes from."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    source: str
    """The key in the old checkpoint."""
    cast: Cast | None = None

    @property
    def num_bytes(self) -> int:
        """The size of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class NewObject(NamedTuple):
    """An object of the new checkpoint."""

    item: bytes
    """It as `torch.save` writes it."""
    plain: Any = None
    """It in the form that our manifest holds; None if JSON cannot hold it, or if the object is None."""
    is_plain: bool = True

    @classmethod
    def of(cls, value: Any) -> NewObject:
        """Return `value`, of Python's built-in types, as an object."""
        return cls(object_item(value), plain_value.encode(value))


class NewState(NamedTuple):
    """What a new checkpoint has in it."""

    tensors: Mapping[str, NewTensor]
    objects: Mapping[str, NewObject]
    paths: Mapping[str, KeyPath]
    """The place of each key in the nested state; DCP calls this the planner data."""


# Elements of one dtype as another one, slice by slice. Imports torch where it casts.


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
def _cached_cast(before: str, after: str) -> Cast:
    """Return the one cast of these dtypes: each keeps memory for a slice."""
    return Cast(before, after)


def cast_between(before: str, after: str) -> Cast | None:
    """Return the cast of a tensor of the dtype `before` if `after` is wanted; None for a tensor that stays as it is."""
    return None if not after or before == after or before not in FLOATING else _cached_cast(before, after)
