"""A stored tensor: its chunks and their places in the files, and the proof that they make up the tensor. Without torch.

A tensor without a `chunk_mismatch` is covered by its chunks exactly once, and torch can make a tensor of its shape.
Sharding cuts a tensor into chunks of one size, one after another along a dimension, one in the file of each rank and
mostly at the same byte of it. Such a row of chunks is a `ChunkRun`. A table of runs grows with the tensors; one of
chunks grows with tensors x ranks. The chunks of a run adjoin each other, so together they cover one box, and which of
them overlap with a part of the tensor follows by arithmetic: both take the same time for a run of any length.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from torchtitan_lite.store import layout

Shape = tuple[int, ...]


def row_major_strides(shape: Shape) -> Shape:
    """Return the strides, in elements, of a row-major tensor of `shape`."""
    strides = accumulate((max(size, 1) for size in reversed(shape[1:])), operator.mul, initial=1)
    return tuple(strides)[::-1] if shape else ()


def is_inside(offsets: Sequence[int], shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Return whether the box of `shape` at `offsets` is inside a tensor of shape `whole`."""
    if not len(offsets) == len(shape) == len(whole):
        return False
    return all(begin >= 0 and begin + n <= size for begin, n, size in zip(offsets, shape, whole, strict=True))


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

    def place(self, itemsize: int) -> Item:
        """Return the bytes of its file that have to be read for its elements, of `itemsize` bytes each."""
        return self.item or Item(self.file, self.at or 0, self.numel * itemsize)


_INT64 = 1 << 63
_MOST_CORNERS = 1 << 24
"""Of the chunks of one tensor. Those of 1,000 ranks over 5 dimensions have 32,000."""
LEAST_CHUNKS = 4
"""A tensor of fewer chunks is stored as a list of them, which is as short."""
_MOST_FILES = 1 << 23
"""Files that the different rows of runs in one checkpoint may name together, and ranks: looking each up takes a second
or two."""

Row = tuple[int, int, int]
"""Number of chunks, first rank, and step of the rank: the files of a run."""


# An 8B state on 1,024 ranks has a million chunks. As a list they were 40 MB of manifest, which every save wrote, every
# rank parsed for a load (10 s), and every start read for each kept step.
class ChunkRun(NamedTuple):
    """`num_chunks` chunks of `sizes`, one after another along `dim`, from `offsets` on."""

    num_chunks: int
    rank: int
    """Rank whose file holds the first one."""
    rank_step: int
    """From the rank of one chunk to that of the next one."""
    at: int
    """The byte where each of them begins, in the file of its rank."""
    dim: int
    offsets: Shape
    sizes: Shape

    @property
    def row(self) -> Row:
        """Return what names the files of the run."""
        return self.num_chunks, self.rank, self.rank_step

    def chunk(self, number: int) -> Chunk:
        """Return chunk `number`."""
        offsets = self.offsets
        if number:
            along = offsets[self.dim] + number * self.sizes[self.dim]
            offsets = (*offsets[: self.dim], along, *offsets[self.dim + 1 :])
        return Chunk(layout.data_file(self.rank + number * self.rank_step, 0), self.at, offsets, self.sizes)

    def box(self) -> Chunk:
        """Return all of them as one chunk; its place means nothing."""
        if self.num_chunks == 1:
            return Chunk("", self.at, self.offsets, self.sizes)
        sizes = self.sizes
        along = self.num_chunks * sizes[self.dim]
        return Chunk("", self.at, self.offsets, (*sizes[: self.dim], along, *sizes[self.dim + 1 :]))

    def overlapping(self, offsets: Shape, sizes: Shape) -> range:
        """Return the numbers of the chunks that have an element in the box of `sizes` at `offsets`."""
        box = self.box()
        for begin, size, own, length in zip(offsets, sizes, box.offsets, box.sizes, strict=True):
            if min(begin + size, own + length) <= max(begin, own):
                return range(0)
        if self.num_chunks == 1:
            return range(1)
        length = self.sizes[self.dim]
        first = offsets[self.dim] - self.offsets[self.dim]
        end = first + sizes[self.dim]
        return range(max(0, first // length), min(self.num_chunks, -(-end // length)))


@dataclass(frozen=True)
class ChunkRuns(Sequence[Chunk]):
    """The chunks of `runs`, one run after another. Each chunk is made on access."""

    runs: tuple[ChunkRun, ...]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[Chunk]:
        return (run.chunk(number) for run in self.runs for number in range(run.num_chunks))

    def __getitem__(self, number: int) -> Chunk:  # type: ignore[override]  # no slice of them is needed
        place = range(len(self))[number]
        of_run = bisect_right(self._ends, place)
        return self.runs[of_run].chunk(place - (self._ends[of_run - 1] if of_run else 0))

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(accumulate(run.num_chunks for run in self.runs))

    def overlapping(self, offsets: Shape, sizes: Shape) -> Iterator[Chunk]:
        """Yield the chunks that have an element in the box of `sizes` at `offsets`."""
        return (run.chunk(number) for run in self.runs for number in run.overlapping(offsets, sizes))

    def in_file(self, file: str) -> Iterator[Chunk]:
        """Yield the chunks in `file`."""
        rank = layout.rank_of(file)
        if rank is None or file != layout.data_file(rank, 0):
            return
        for run in self.runs:
            number, rest = divmod(rank - run.rank, run.rank_step)
            if not rest and 0 <= number < run.num_chunks:
                yield run.chunk(number)

    @property
    def cuts(self) -> tuple[object, ...]:
        """Return what depends on how the tensor is cut, and not on where its chunks lie."""
        return tuple((run.num_chunks, run.dim, run.offsets, run.sizes) for run in self.runs)


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
    # The box of a run covers the same elements as often as its chunks.
    chunks = tensor.chunks if tensor.runs is None else [run.box() for run in tensor.runs.runs]
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


class FileSizes:
    """The `sizes` of files by name, for questions about those of complete rows of ranks."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._by_rank: list[int] = []
        """The sizes of the files of the ranks up to the highest that was in question; -1: it has none."""
        self._least: dict[Row, int] = {}
        """The smallest size of the files of each row that was in question; -1 if one is missing."""

    def outside(self, chunks: ChunkRuns, itemsize: int) -> Iterator[Chunk]:
        """Yield those of `chunks`, whose elements have `itemsize` bytes, that are in a missing or too short file."""
        for run in chunks.runs:
            num_bytes = math.prod(run.sizes) * itemsize
            end = run.at + num_bytes if num_bytes else 0
            row = run[:3]
            if row not in self._least:
                self._least[row] = min(self._of_row(row))
            if self._least[row] < end:
                yield from (run.chunk(n) for n, size in enumerate(self._of_row(row)) if size < end)

    def _of_row(self, row: Row) -> list[int]:
        count, rank, step = row
        end = rank + (count - 1) * step + 1
        if end > len(self._sizes):  # Also of a damaged table: rank and step may be any numbers.
            return [self._of_rank(each) for each in range(rank, end, step)]
        self._by_rank += map(self._of_rank, range(len(self._by_rank), end))
        return self._by_rank[rank:end:step]

    def _of_rank(self, rank: int) -> int:
        return self._sizes.get(layout.data_file(rank, 0), -1)


def files_of_rows(rows: Collection[Row]) -> frozenset[str]:
    """Return the names of the files of all `rows`."""
    ranks: set[int] = set()
    for count, rank, step in rows:
        ranks.update(range(rank, rank + count * step, step))
    return frozenset(layout.data_file(rank, 0) for rank in ranks)


def check_rows(rows: Collection[Row], num_files: int) -> None:
    """Raise ValueError if runs with these rows cannot be those of a checkpoint of `num_files` files."""
    longest = max((count for count, _, _ in rows), default=0)
    if longest > num_files:
        raise ValueError(f"a run of {longest} chunks, each in another file, but there are {num_files} files")
    if any(rank + (count - 1) * step >= _MOST_FILES for count, rank, step in rows):
        raise ValueError(f"a run that ends past rank {_MOST_FILES}")
    if (total := sum(count for count, _, _ in rows)) > _MOST_FILES:
        raise ValueError(f"runs over {total} files in all; expected at most {_MOST_FILES}")


def decode_runs(value: Any, num_dims: int) -> ChunkRuns:
    """Return the runs that `encode_runs` made, of a tensor of `num_dims` dimensions. Raises ValueError."""
    if type(value) is not list:
        raise ValueError(f"expected a list of runs, found {type(value).__name__}")
    return ChunkRuns(tuple(_decoded_run(each, num_dims) for each in value))


def _decoded_run(value: Any, num_dims: int) -> ChunkRun:
    expected = "expected a run of [count, [rank, step], at, dim, offsets, sizes]"
    if type(value) is not list or [*map(type, value)] != [int, list, int, int, list, list]:
        raise ValueError(expected)
    count, ranks, at, dim, offsets, sizes = value
    if not {*map(type, (*ranks, *offsets, *sizes))} <= {int} or len(ranks) != 2:
        raise ValueError(expected)
    if not len(offsets) == len(sizes) == num_dims:
        raise ValueError("a run has another number of dimensions")
    rank, step = ranks
    if min(count - 1, rank, step - 1, at, dim, *offsets, *sizes) < 0:
        raise ValueError("a run has a negative number, no chunk, or all its chunks in one file")
    if count > 1 and (dim >= num_dims or sizes[dim] == 0):
        raise ValueError("the chunks of a run do not lie one after another")
    return ChunkRun(count, rank, step, at, dim, tuple(offsets), tuple(sizes))
