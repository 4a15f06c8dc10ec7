"""The elements of a stored tensor, in the order of the whole tensor, slice by slice.

However a tensor was cut into chunks and files, `slices` yields its elements in row-major order of the whole tensor,
with memory for two slices and 32 blocks, not for the tensor. Each block is read once, and verified in that pass.
Exceptions: where more than `KEPT_BLOCKS` chunks are side by side, and in chunks that plain DCP stored in another order
of dimensions, parts are read several times, then through the page cache; and a chunk in an unusual form of
`torch.save` is read as a whole. Only this last case imports torch.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan_lite.checkpoint.format.chunk_runs import row_major_strides
from torchtitan_lite.checkpoint.format.contents import Chunk, Contents, Item, Shape
from torchtitan_lite.checkpoint.format.dtypes import dtype_name
from torchtitan_lite.checkpoint.reading.files import files_of
from torchtitan_lite.checkpoint.untrusted.stock_item import item_reader, locate
from torchtitan_lite.disk.block_reader import BlockReader, DamagedRange
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord
from torchtitan_lite.disk.read_requests import Piece, Segment, scatter
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnsafe, reading
from torchtitan_lite.store.place import Place

SLICE_BYTES = 8 << 20
"""The largest slice, unless the caller wants another size; a slice has at least one element."""
_SPAN_BYTES = 4 << 20
"""The largest range of a file that is read for elements that are not in a row there."""
KEPT_BLOCKS = 32
"""Blocks in memory at a time, and so the number of chunks side by side in a tensor's rows that are read only once."""
_LONG_STEP_BYTES = 32 << 10
"""Rows so far apart in a file are read one by one."""

_Elements = npt.NDArray[Any]
"""Elements as plain bytes, of numpy's type V4 for 4 bytes each."""


class _Part(NamedTuple):
    """A chunk, and the place of its elements."""

    chunk: Chunk
    begin: int
    """The number of its first element in the whole tensor."""
    end: int
    """The number after that of its last."""
    file: str
    at: int
    """The byte of the file where its first element starts."""
    strides: Shape | None = None
    """In elements of the file, if they are not row-major there."""
    held: _Elements | None = None
    """The chunk itself, if it could only be read as a whole."""


class TensorStream:
    """Reads the tensors of the checkpoint at `folder` that `contents` describes, verified where `records` has digests.

    `contents` must be checked: chunks cover every tensor exactly once and are inside the files. Any thread, one at a
    time.
    """

    def __init__(
        self,
        folder: Place,
        contents: Contents,
        records: Mapping[str, FileRecord],
        strides: Mapping[str, Shape] | None = None,
    ) -> None:
        """`strides` has those, in elements, of the tensors of one chunk at a known byte that is not row-major there."""
        self._folder, self._strides = folder, strides or {}
        self.contents = contents
        self._files, self._records = files_of(folder), records
        self._direct, self._cached = self._files.reader(), self._files.reader(cached=True)
        self.reader = self._direct if isinstance(self._direct, BlockReader) else BlockReader()
        """For reads from a disk while this stream lives: it keeps memory for its requests."""
        self._kept: OrderedDict[tuple[str, int], bytearray] = OrderedDict()
        self._scratch = memoryview(b"")
        self._key: str | None = None
        self._parts: list[_Part] = []

    def slices(self, key: str, most_elements: int | None = None, within: Cut | None = None) -> Iterator[memoryview]:
        """Yield the elements of the tensor `key`, at most `most_elements` at a time, by default `SLICE_BYTES`.

        They are little-endian, and a slice is valid until the next. `within` limits them to one cut of the tensor.
        Raises `CheckpointDamaged`, naming file, bytes and keys; `CheckpointUnsafe`; and `CheckpointUnreadable`.
        """
        tensor = self.contents.tensors[key]
        itemsize = tensor.dtype.itemsize
        most = most_elements or max(1, SLICE_BYTES // itemsize)
        room = _new_buffer(min(most, math.prod(tensor.shape)) * itemsize)
        for cut in self._cuts(key, within or Cut.whole(tensor.shape), most):
            data = room[: cut.numel * itemsize]
            self.read(key, cut, data)
            yield data

    def _cuts(self, key: str, whole: Cut, most: int) -> Iterator[Cut]:
        """Return cuts of at most `most` elements that make up `whole` of the tensor `key`, in order."""
        return cuts_of(whole, most)

    def read(self, key: str, cut: Cut, into: memoryview) -> None:
        """Fill `into` with the elements of `cut` of the tensor `key`. Raises as `slices` does.

        Each block is read once if the cuts of a tensor ascend.
        """
        if key != self._key:
            self._parts, self._key = self._parts_of(key), key
        itemsize = self.contents.tensors[key].dtype.itemsize
        if len(self._scratch) < len(into):
            self._scratch = _new_buffer(len(into))
        whole = np.frombuffer(into, f"V{itemsize}").reshape(cut.sizes)
        wanted = list(self._wanted(cut))
        pieces: dict[str, list[Piece]] = {}
        copies: list[tuple[_Elements, memoryview]] = []
        scratch = self._scratch
        for part, first, inside, sizes in wanted:
            target = whole[_box_index(first, sizes)]
            if part.held is not None:
                target[...] = part.held[_box_index(inside, sizes)]
            elif part.strides is not None:
                at = part.at + sum(map(int.__mul__, inside, part.strides)) * itemsize
                self._read_spans(part.file, at, part.strides, target)
            else:
                num_bytes = math.prod(sizes) * itemsize
                if is_range(sizes, cut.sizes):
                    begin = number_of(first, cut.sizes) * itemsize
                    place = into[begin : begin + num_bytes]
                else:
                    # Its rows are apart in `into`: read them together, and copy each to its place.
                    place, scratch = scratch[:num_bytes], scratch[num_bytes:]
                    copies.append((target, place))
                at = part.at + number_of(inside, part.chunk.sizes) * itemsize
                pieces.setdefault(part.file, []).append(Piece(at, place))
        for file, of_file in pieces.items():
            self._fill(file, of_file, chunks=len(wanted), again=len(wanted) > KEPT_BLOCKS)
        for target, place in copies:
            target[...] = np.frombuffer(place, target.dtype).reshape(target.shape)

    def read_item(self, item: Item) -> bytes:
        """Return the bytes of `item`. Raises as `slices` does."""
        data = bytearray(item.length)
        self._fill(item.file, [Piece(item.offset, memoryview(data))])
        return bytes(data)

    def _wanted(self, cut: Cut) -> Iterator[tuple[_Part, Shape, Shape, Shape]]:
        """Yield each part with elements of `cut`: where they begin in the cut and in the chunk, and their sizes."""
        for part in self._parts:
            if cut.begin < part.end and part.begin < cut.begin + cut.numel:
                found = overlap(cut, part.chunk.offsets, part.chunk.sizes)
                if found is not None:
                    offsets, sizes = found
                    yield part, _minus(offsets, cut.offsets), _minus(offsets, part.chunk.offsets), sizes

    def _read_spans(self, file: str, at: int, strides: Shape, target: _Elements) -> None:
        """Fill `target` with elements of `file` that are `strides` elements apart, the first at byte `at`."""
        itemsize, sizes = target.dtype.itemsize, target.shape
        span = (sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True)) + 1) * itemsize
        long_dims = [dim for dim, size in enumerate(sizes) if size > 1 and strides[dim]]
        dim = max(long_dims, key=lambda d: strides[d], default=None)
        step = strides[dim] * itemsize if dim is not None else 0
        if dim is None or (span <= _SPAN_BYTES and step < _LONG_STEP_BYTES):
            data = memoryview(bytearray(span))
            self._fill(file, [Piece(at, data)], again=True)
            in_bytes = tuple(stride * itemsize for stride in strides)
            target[...] = np.ndarray(sizes, target.dtype, data, strides=in_bytes)
            return
        rows = max(1, _SPAN_BYTES // step) if step < _LONG_STEP_BYTES else 1
        rows = min(rows, sizes[dim] - 1)
        for begin in range(0, sizes[dim], rows):
            part = target[(slice(None),) * dim + (slice(begin, begin + rows),)]
            self._read_spans(file, at + begin * step, strides, part)

    def _parts_of(self, key: str) -> list[_Part]:
        tensor = self.contents.tensors[key]
        parts = []
        for chunk in tensor.chunks:
            if 0 in chunk.sizes:
                continue
            begin = number_of(chunk.offsets, tensor.shape)
            last = tuple(offset + size - 1 for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
            end = number_of(last, tensor.shape) + 1
            if chunk.at is not None:
                parts.append(_Part(chunk, begin, end, chunk.file, chunk.at, self._strides.get(key)))
            else:
                parts.append(self._part_of_item(key, chunk, begin, end))
        return parts

    def _part_of_item(self, key: str, chunk: Chunk, begin: int, end: int) -> _Part:
        """Return the part of a chunk whose elements only parsing its item finds."""
        item = chunk.item
        assert item is not None
        with reading(self._files.path_of(item.file)), self._files.opened(item.file) as fd:
            layout = locate(item_reader(fd, item), item.length)
        if layout is None:
            return _Part(chunk, begin, end, item.file, item.offset, held=self._held(key, chunk, item))
        self._check_item(key, chunk, f"{dtype_name(layout.dtype)} {list(layout.shape)}")
        strides = None if is_row_major(layout.shape, layout.strides) else layout.strides
        return _Part(chunk, begin, end, item.file, item.offset + layout.at, strides)

    def _held(self, key: str, chunk: Chunk, item: Item) -> _Elements:
        """Return the elements of a chunk that only `torch.load` can read."""
        import torch  # seconds, and hardly ever needed

        from torchtitan_lite.checkpoint.untrusted.safe_load import UnsafeItem, load_item  # as above

        try:
            tensor = load_item(self.read_item(item))
        except UnsafeItem as error:
            raise CheckpointUnsafe(str(self._folder), f"{key} in {item.file}: {error}") from None
        is_tensor = isinstance(tensor, torch.Tensor)
        found = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}" if is_tensor else type(tensor).__name__
        self._check_item(key, chunk, found)
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        elements: _Elements = plain.view(torch.uint8).numpy().view(f"V{plain.itemsize}").reshape(chunk.sizes)
        return elements

    def _check_item(self, key: str, chunk: Chunk, found: str) -> None:
        expected = f"{dtype_name(self.contents.tensors[key].dtype)} {list(chunk.sizes)}"
        if found != expected:
            finding = f"{key}: {self.contents.described_in} says {expected}, its item is {found}"
            raise CheckpointDamaged(str(self._folder), finding, [key])

    def _fill(self, file: str, pieces: Sequence[Piece], *, chunks: int = 1, again: bool = False) -> None:
        try:
            self._read_once(file, pieces, chunks, again)
        except DamagedRange as damage:
            finding = f"bytes {damage.begin} to {damage.end} of {file}: {damage.finding}"
            keys = self.contents.keys_in(file, damage.begin, damage.end)
            raise CheckpointDamaged(str(self._folder), finding, keys) from None

    # A block with a digest can only be verified as a whole, but the slices of a tensor begin and end within blocks:
    # without memory, a block would be read for each slice that touches it. So the blocks in which pieces begin and end
    # are kept, a few for each chunk that is being read, and up to `KEPT_BLOCKS`. All others are read straight into
    # their place.

    def _read_once(self, file: str, pieces: Sequence[Piece], chunks: int, again: bool) -> None:
        """Fill `pieces` with their bytes of `file`. Raises as `BlockReader.read` does.

        `chunks` is how many are read in turn, piece by piece, in all files. `again` reads through the page cache: for
        bytes that are probably read several times.
        """
        path, record = self._files.path_of(file), self._records.get(file)
        blocks = self._cached if again else self._direct
        if record is None or not record.blocks:
            blocks.read(path, record, pieces)
            return
        straight: list[Piece] = []
        edges: list[tuple[int, Piece]] = []
        for piece in pieces:
            _split_by_block(piece, record.size, straight, edges)
        missing = {number for number, _ in edges} - {number for name, number in self._kept if name == file}
        sizes = {number: min(BLOCK_BYTES, record.size - number * BLOCK_BYTES) for number in sorted(missing)}
        fresh = {number: bytearray(size) for number, size in sizes.items()}
        straight += [Piece(number * BLOCK_BYTES, memoryview(room)) for number, room in fresh.items()]
        if straight:
            blocks.read(path, record, straight)
        for number, piece in edges:
            block = fresh.get(number) or self._kept[file, number]
            scatter(Segment.of(piece), number * BLOCK_BYTES, memoryview(block))
        for number, _ in edges:
            if number in fresh:
                self._kept[file, number] = fresh[number]
            self._kept.move_to_end((file, number))
        while len(self._kept) > min(2 * chunks + 2, KEPT_BLOCKS):
            self._kept.popitem(last=False)


def _new_buffer(num_bytes: int) -> memoryview:
    return np.empty(num_bytes, np.uint8).data


def _minus(a: Shape, b: Shape) -> Shape:
    return tuple(map(int.__sub__, a, b))


def _box_index(offsets: Shape, sizes: Shape) -> tuple[Any, ...]:
    """Return the index of a box; with an ellipsis, because numpy returns no view of a scalar without one."""
    return (..., *(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)))


def _split_by_block(piece: Piece, size: int, straight: list[Piece], edges: list[tuple[int, Piece]]) -> None:
    """Add the whole blocks of `piece` to `straight`, and the parts of others to `edges`, with the block's number."""
    at, into = piece
    if at + len(into) > size:  # Past the end of the file: reading it must fail.
        straight.append(piece)
        return
    while into:
        number, within = divmod(at, BLOCK_BYTES)
        block_bytes = min(BLOCK_BYTES, size - number * BLOCK_BYTES)
        if within == 0 and len(into) >= block_bytes:
            count = len(into) if at + len(into) == size else len(into) // BLOCK_BYTES * BLOCK_BYTES
            straight.append(Piece(at, into[:count]))
        else:
            count = min(block_bytes - within, len(into))
            edges.append((number, Piece(at, into[:count])))
        at, into = at + count, into[count:]


# Boxes of a tensor that are ranges of its elements in row-major order.
#
# Within such a box, every chunk of a tensor has one range of its own elements, in any sharding; from box to box these
# ranges ascend. So a sharded tensor is read in order with memory for one box.


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

    They depend on the arguments only: tensors of one shape are cut alike, also with other dtypes and chunks.
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
