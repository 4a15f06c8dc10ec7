"""The content of a checkpoint that is about to be written: tensors of a stored one, and small objects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torchtitan_lite.checkpoint.format import plain_value
from torchtitan_lite.checkpoint.format.structure import Path as KeyPath
from torchtitan_lite.checkpoint.format.torch_item import object_item
from torchtitan_lite.converting.casting import Cast


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
    is_typed: bool = False
    """Whether the item holds the document of `plain_value` in place of the object."""

    @classmethod
    def of(cls, value: Any) -> NewObject:
        """Return `value`, of the types that `plain_value` encodes, as an object."""
        document, is_typed = plain_value.encoded(value)
        return cls(object_item(document if is_typed else value), document)


class NewState(NamedTuple):
    """What a new checkpoint has in it."""

    tensors: Mapping[str, NewTensor]
    objects: Mapping[str, NewObject]
    paths: Mapping[str, KeyPath]
    """The place of each key in the nested state; DCP calls this the planner data."""
