"""A stored tensor: its chunks and their places in the files, and the proof that they make up the tensor. Without torch.

A tensor without a `chunk_mismatch` is covered by its chunks exactly once, and torch can make a tensor of its shape.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torchtitan_lite.checkpoint.format.chunk_runs import Chunk, ChunkRuns, Shape

_INT64 = 1 << 63
_MOST_CORNERS = 1 << 24
"""Of the chunks of one tensor. Those of 1,000 ranks over 5 dimensions have 32,000."""


class StoredTensor(NamedTuple):
    """A whole tensor, stored in chunks."""

    dtype: Any
    """A value of the table that the contents were made with: a `Dtype`, or torch's where tensors are loaded."""
    shape: Shape
    chunks: Sequence[Chunk]
    runs: ChunkRuns | None = None
    """The same as `chunks`, where these are stored as runs: questions about all of them need not make each."""

    def near(self, offsets: Shape, sizes: Shape) -> Iterable[Chunk]:
        """Return all chunks with an element in the box of `sizes` at `offsets`, and perhaps others."""
        return self.chunks if self.runs is None else self.runs.overlapping(offsets, sizes)

    def chunks_in(self, file: str) -> Iterable[Chunk]:
        """Return the chunks in `file`."""
        if self.runs is not None:
            return self.runs.in_file(file)
        return (chunk for chunk in self.chunks if chunk.file == file)

    @property
    def nbytes(self) -> int:
        """The size of its elements in bytes."""
        num_bytes: int = math.prod(self.shape) * self.dtype.itemsize
        return num_bytes


def chunk_mismatch(tensor: StoredTensor) -> str:
    """Return why the chunks of `tensor` do not make up the tensor; the empty string if they do."""
    shape = tensor.shape
    chunks = tensor.chunks if tensor.runs is None else tensor.runs.boxes()
    # torch computes the strides of an empty tensor from its other sizes, so these must not overflow either.
    if not _is_possible_shape(shape, tensor.dtype.itemsize):
        return "its shape is not possible for a tensor"
    if len(chunks) == 1 and chunks[0].sizes == shape and not any(chunks[0].offsets):
        return "" if len(chunks[0].offsets) == len(shape) else "a chunk has another number of dimensions"
    boxes = []
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
            return "a chunk has another number of dimensions"
        if min(chunk.sizes, default=0) < 0 or min(chunk.offsets, default=0) < 0:
            return "a chunk has a negative offset or size"
        if 0 in chunk.sizes:
            continue
        if any(offset + size > end for offset, size, end in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            return "a chunk is partly outside of it"
        boxes.append(chunk)
    covered, numel = sum(chunk.numel for chunk in boxes), math.prod(shape)
    if covered == numel and (not numel or _is_tiling(boxes, shape)):
        return ""
    return f"its chunks have {covered} elements where there are {numel}" if covered != numel else "its chunks overlap"


@lru_cache(maxsize=4096)
def _is_possible_shape(shape: Shape, itemsize: int) -> bool:
    """Return whether a tensor can have this shape: its strides, and its size in bytes, are numbers of 64 bits."""
    return min(shape, default=0) >= 0 and math.prod(max(size, 1) for size in shape) * itemsize < _INT64


def _is_tiling(boxes: Sequence[Chunk], shape: Shape) -> bool:
    """Return whether the boxes, none of them empty, cover a tensor of `shape` exactly once.

    The number of boxes around a point is a function, and so is the 1 of the whole tensor. The two are equal if and only
    if their mixed differences are: 1 or -1 at each corner of a box, in turn along each edge, summed over all boxes.
    Also returns False where boxes are cut along too many dimensions for their corners to be counted.
    """
    # Along the other dimensions every box is as long as the tensor, and the corners are the same.
    cut = [dim for dim, size in enumerate(shape) if any(box.sizes[dim] != size for box in boxes)]
    if len(boxes) << len(cut) > _MOST_CORNERS:
        return False
    sums: defaultdict[tuple[int, ...], int] = defaultdict(int)
    whole = Chunk("", None, (0,) * len(shape), shape)
    for box, count in (*((box, 1) for box in boxes), (whole, -1)):
        corners: list[tuple[tuple[int, ...], int]] = [((), count)]
        for dim in cut:
            begin, end = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
            corners = [corner for at, sign in corners for corner in (((*at, begin), sign), ((*at, end), -sign))]
        for at, sign in corners:
            sums[at] += sign
    return not any(sums.values())
