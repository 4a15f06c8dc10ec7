"""Rows of queries and keys, in the order that a rotary embedding wants.

Llama's own code, and ours, rotates neighbours: rows 2i and 2i + 1 of a head are a pair. Hugging Face's rotates halves:
rows i and i + half of a head are that pair. So the same weights need another order of rows in each head:

    row p * half + i of a head in halves  =  row 2i + p of the head in pairs        for p in (0, 1), i < half

Rows are reordered while they are read, with memory for the source rows of one slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from torchtitan_lite.checkpoint.format.contents import Contents, Item
from torchtitan_lite.disk.block_reader import BlockReader
from torchtitan_lite.examining.cut import Cut, cuts_of
from torchtitan_lite.examining.tensor_stream import SLICE_BYTES, Slice, Stream

Order = Literal["halves", "pairs"]

_Rows = npt.NDArray[np.intp]


def rows_in_order(rows: _Rows, head_dim: int, order: Order) -> _Rows:
    """Return the number of the row that comes to each of `rows` in a tensor whose heads shall be in `order`."""
    half, within = head_dim // 2, rows % head_dim
    source = 2 * (within % half) + within // half if order == "halves" else within // 2 + half * (within % 2)
    return rows - within + source


class ReorderedStream:
    """Reads tensors of `stream`; those in `head_dims`, by key, with the rows of each head in `order`.

    The numbers of rows must be multiples of the numbers in `head_dims`, and these even. Any thread, one at a time.
    """

    def __init__(self, stream: Stream, head_dims: Mapping[str, int], order: Order) -> None:
        self.contents: Contents = stream.contents
        self.reader: BlockReader = stream.reader
        self._stream, self._head_dims, self._order = stream, head_dims, order
        self._scratch = memoryview(b"")

    def slices(self, key: str, most_elements: int | None = None, within: Cut | None = None) -> Iterator[Slice]:
        """Yield the elements as `TensorStream.slices` does; a slice of reordered rows ends between heads if it can."""
        if key not in self._head_dims:
            yield from self._stream.slices(key, most_elements, within)
            return
        tensor = self.contents.tensors[key]
        itemsize = tensor.dtype.itemsize
        most = most_elements or max(1, SLICE_BYTES // itemsize)
        whole = Cut(0, (0,) * len(tensor.shape), tensor.shape) if within is None else within
        room = np.empty(min(most, whole.numel) * itemsize, np.uint8).data
        for cut in _between_heads(whole, tensor.shape, self._head_dims[key], most):
            data = room[: cut.numel * itemsize]
            self.read(key, cut, data)
            yield Slice(cut.begin, data)

    def read(self, key: str, cut: Cut, into: memoryview) -> None:
        """Fill `into` with the elements of `cut`, as `TensorStream.read` does."""
        if key not in self._head_dims:
            self._stream.read(key, cut, into)
            return
        itemsize = self.contents.tensors[key].dtype.itemsize
        begin, num_rows = cut.offsets[0], cut.sizes[0]
        rows = rows_in_order(np.arange(begin, begin + num_rows), self._head_dims[key], self._order)
        first, last = int(rows.min()), int(rows.max())
        row_elements = math.prod(self.contents.tensors[key].shape[1:])
        source = Cut(
            cut.begin + (first - begin) * row_elements, (first, *cut.offsets[1:]), (last + 1 - first, *cut.sizes[1:])
        )
        num_bytes = source.numel * itemsize
        if len(self._scratch) < num_bytes:
            self._scratch = np.empty(num_bytes, np.uint8).data
        read = self._scratch[:num_bytes]
        self._stream.read(key, source, read)
        # A row is one item: it is copied as it is.
        width = f"V{math.prod(cut.sizes[1:]) * itemsize}"
        # "clip" lets numpy write into the target without a copy of its own; every number is valid.
        np.take(np.frombuffer(read, width), rows - first, out=np.frombuffer(into, width), mode="clip")

    def read_item(self, item: Item) -> bytes:
        """Return the bytes of `item`."""
        return self._stream.read_item(item)


def _between_heads(whole: Cut, shape: tuple[int, ...], head_dim: int, most: int) -> Iterator[Cut]:
    """Yield cuts of at most `most` elements that make up `whole`: whole heads where `most` has room for one."""
    row_elements = math.prod(shape[1:])
    heads = most // (head_dim * row_elements) if row_elements else 0
    if not heads or whole.sizes[1:] != shape[1:]:
        yield from cuts_of(whole, most)
        return
    at, end = whole.offsets[0], whole.offsets[0] + whole.sizes[0]
    while at < end:
        stop = min(end, (at // head_dim + heads) * head_dim)
        begin = whole.begin + (at - whole.offsets[0]) * row_elements
        yield Cut(begin, (at, *whole.offsets[1:]), (stop - at, *whole.sizes[1:]))
        at = stop
