"""A stored piece of a tensor, and its place in a file. Without torch."""

from __future__ import annotations

import math
from typing import NamedTuple

Shape = tuple[int, ...]


class Item(NamedTuple):
    """The bytes of one `torch.save` within a file."""

    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """A stored piece of a tensor: the box of `sizes` at `offsets`."""

    file: str
    at: int | None
    """The byte in `file` where its elements start, row-major; None if only parsing `item` finds it."""
    offsets: Shape
    sizes: Shape
    item: Item | None = None
    """The `torch.save` item that holds it, if a reader must parse that to find the elements."""

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.sizes)
