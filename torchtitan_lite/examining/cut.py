"""Boxes of a tensor that are ranges of its elements in row-major order.

Within such a box, every chunk of a tensor has one range of its own elements, in any sharding; from box to box these
ranges ascend. This lets a reader go through a sharded tensor in order with memory for one box.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from torchtitan_lite.checkpoint.format.chunk_runs import row_major_strides

Shape = tuple[int, ...]


class Cut(NamedTuple):
    """The box of `sizes` at `offsets` in a tensor."""

    begin: int
    """The number of its first element in row-major order."""
    offsets: Shape
    sizes: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Cut:
        """Return all of a tensor of `shape`."""
        return cls(0, (0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.sizes)


def cuts(shape: Shape, most_elements: int) -> Iterator[Cut]:
    """Yield cuts of at most `most_elements` that make up a tensor of `shape`, in order; none if it is empty.

    They depend on the arguments only: tensors of one shape are cut alike, whatever their dtypes and chunks.
    """
    if 0 in shape:
        return
    if not shape:
        yield Cut(0, (), ())
        return
    dim = next((d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= most_elements), len(shape) - 1)
    outer, inner = shape[:dim], shape[dim + 1 :]
    step = max(1, most_elements // math.prod(inner))
    for number, index in enumerate(product(*map(range, outer))):
        for at in range(0, shape[dim], step):
            size = min(step, shape[dim] - at)
            begin = (number * shape[dim] + at) * math.prod(inner)
            yield Cut(begin, (*index, at, *(0,) * len(inner)), (*(1,) * dim, size, *inner))


def cuts_of(cut: Cut, most_elements: int) -> Iterator[Cut]:
    """Yield cuts of at most `most_elements` that make up `cut`, in order."""
    for part in cuts(cut.sizes, most_elements):
        offsets = tuple(map(int.__add__, cut.offsets, part.offsets))
        yield Cut(cut.begin + part.begin, offsets, part.sizes)


def overlap(cut: Cut, offsets: Shape, sizes: Shape) -> tuple[Shape, Shape] | None:
    """Return (offsets, sizes) of the part of `cut` in the box of `sizes` at `offsets`; None if there is none."""
    begins = tuple(map(max, cut.offsets, offsets))
    ends = (min(a + n, b + m) for a, n, b, m in zip(cut.offsets, cut.sizes, offsets, sizes, strict=True))
    lengths = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return (begins, lengths) if min(lengths, default=1) > 0 else None


def is_range(sizes: Shape, whole: Shape) -> bool:
    """Return whether the elements of a box of `sizes`, anywhere in a tensor of shape `whole`, are in a row there."""
    dim = next((d for d, size in enumerate(sizes) if size > 1), len(sizes))
    return sizes[dim + 1 :] == whole[dim + 1 :]


def number_of(index: Shape, shape: Shape) -> int:
    """Return the number, in row-major order, of the element at `index` of a tensor of `shape`."""
    number = 0
    for at, size in zip(index, shape, strict=True):
        number = number * size + at
    return number


def is_row_major(shape: Shape, strides: Shape) -> bool:
    """Return whether a tensor of `shape` with these `strides`, in elements, is row-major."""
    plain = row_major_strides(shape)
    return all(size == 1 or strides[dim] == plain[dim] for dim, size in enumerate(shape))
