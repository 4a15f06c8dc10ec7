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

from torchtitan_lite.checkpoint.format.contents import Contents, Shape
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.examining.tensor_stream import Cut, TensorStream, cuts_of
from torchtitan_lite.store.place import Place

Order = Literal["halves", "pairs"]

_Rows = npt.NDArray[np.intp]


def rows_in_order(rows: _Rows, head_dim: int, order: Order) -> _Rows:
    """Return the number of the row that comes to each of `rows` in a tensor whose heads shall be in `order`."""
    half, within = head_dim // 2, rows % head_dim
    source = 2 * (within % half) + within // half if order == "halves" else within // 2 + half * (within % 2)
    return rows - within + source


class ReorderedStream(TensorStream):
    """Reads tensors as `TensorStream` does; those in `head_dims`, by key, with the rows of each head in `order`.

    The numbers of rows must be multiples of the numbers in `head_dims`, and these even. A slice of reordered rows ends
    between heads if it can.
    """

    def __init__(
        self,
        folder: Place,
        contents: Contents,
        records: Mapping[str, FileRecord],
        strides: Mapping[str, Shape],
        head_dims: Mapping[str, int],
        order: Order,
    ) -> None:
        super().__init__(folder, contents, records, strides)
        self._head_dims, self._order = head_dims, order
        self._source_rows = memoryview(b"")

    def _cuts(self, key: str, whole: Cut, most: int) -> Iterator[Cut]:
        if key not in self._head_dims:
            return super()._cuts(key, whole, most)
        return _between_heads(whole, self.contents.tensors[key].shape, self._head_dims[key], most)

    def read(self, key: str, cut: Cut, into: memoryview) -> None:
        if key not in self._head_dims:
            super().read(key, cut, into)
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
        if len(self._source_rows) < num_bytes:
            self._source_rows = np.empty(num_bytes, np.uint8).data
        read = self._source_rows[:num_bytes]
        super().read(key, source, read)
        # A row is one item: it is copied as it is.
        width = f"V{math.prod(cut.sizes[1:]) * itemsize}"
        # "clip" lets numpy write into the target without a copy of its own; every number is valid.
        np.take(np.frombuffer(read, width), rows - first, out=np.frombuffer(into, width), mode="clip")


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
