"""What a rank reads of a checkpoint, and how each part of it comes to its place.

Each rank knows what it needs, and plans before any rank reads data, so that a mismatch on one ends the load on all. It
reads regions: boxes of stored tensors. If elements that are contiguous in the file are also contiguous in memory, they
are read directly into their place, which may be one that a ring leads to. Otherwise (another dtype, another kind of
device, rows too short to be read one by one) a part of bounded size at a time is read into a buffer and copied from
there: it is staged.

A model may have tens of thousands of tensors of a few KiB, and then a load takes longer in Python than on the disk. So
those that one rank reads completely and as they are stored are not planned one by one, but in columns: for each the
load notes where it is in the file and in memory, and the disk's side copies it there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.devices.buffer_ring import DeviceRing
from torchtitan_lite.checkpoint.format.chunk_runs import is_inside, row_major_strides
from torchtitan_lite.checkpoint.format.contents import Chunk, Shape, StoredTensor
from torchtitan_lite.checkpoint.format.shards import PLAIN_TENSORS, local_shards
from torchtitan_lite.checkpoint.format.tensor_table import TensorKind, TensorTable
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.collection import no_collection
from torchtitan_lite.disk.read_requests import GAP_BYTES, Piece, PieceTable
from torchtitan_lite.errors import CheckpointMismatch

STAGED_BYTES = 8 << 20
"""Largest buffer of one staged part (larger only if a single element is)."""
_LONG_RUN_BYTES = 16 << 10
"""Runs from this length on are read one by one."""
SMALL_BYTES = 32 << 10
"""Up to this size, planning and reading a tensor by itself takes longer than one more copy of it."""


class Region(NamedTuple):
    """A read of the box of `target`'s shape at `offsets` in `chunk`, of the tensor `key`, into `target`."""

    key: str
    chunk: Chunk
    offsets: Shape
    target: torch.Tensor


@dataclass
class RankReads:
    """Everything that one rank reads."""

    regions: list[Region] = field(default_factory=list)
    objects: list[tuple[str, Callable[[Any], None]]] = field(default_factory=list)
    """Keys, each with the function that receives its object."""
    small: Mapping[str, PieceTable] = field(default_factory=dict)
    """Tensors in columns, by file; whoever made them keeps their memory until they are read."""


@no_collection()
def planned(state: dict[str, Any], folder: CheckpointFolder) -> RankReads:
    """Return the reads of the checkpoint in `folder` into the flat `state`. Any rank.

    Raises `CheckpointMismatch` for a tensor of another shape.
    """
    contents = folder.contents
    small, others = small_tensors(state, contents.table)
    wanted = RankReads(small=small)
    for key, target in others.items():
        if key in contents.objects:
            wanted.objects.append((key, partial(state.__setitem__, key)))
            continue
        stored = contents.tensors[key]
        if tuple(target.shape) != stored.shape:
            found = f"shape {list(stored.shape)} in the checkpoint, {list(target.shape)} expected"
            raise CheckpointMismatch(str(folder.path), f"  {key}: {found}")
        if len(stored.chunks) == 1 and not isinstance(target, DTensor):
            wanted.regions.append(Region(key, stored.chunks[0], stored.chunks[0].offsets, target.detach()))
            continue
        try:
            parts = list(local_shards(key, target))
        except ValueError as error:
            raise CheckpointMismatch(str(folder.path), f"  {error}") from None
        for offsets, memory in parts:
            wanted.regions += overlaps(key, stored, offsets, memory)
    return wanted


def overlaps(key: str, stored: StoredTensor, offsets: Shape, local: torch.Tensor) -> Iterator[Region]:
    """Yield the overlap of each chunk of `stored` with `local`, which is at `offsets` in the whole tensor."""
    sizes = tuple(local.shape)
    for chunk in stored.near(offsets, sizes):
        if chunk.offsets == offsets and chunk.sizes == sizes:
            yield Region(key, chunk, (0,) * len(sizes), local)
            continue
        begins = tuple(map(max, chunk.offsets, offsets))
        lengths = tuple(
            min(stored + n, own + m) - begin
            for stored, n, own, m, begin in zip(chunk.offsets, chunk.sizes, offsets, sizes, begins, strict=True)
        )
        if min(lengths, default=1) <= 0:
            continue
        target = local
        for dim, (begin, own, length) in enumerate(zip(begins, offsets, lengths, strict=True)):
            target = target.narrow(dim, begin - own, length)
        yield Region(
            key, chunk, tuple(begin - stored for begin, stored in zip(begins, chunk.offsets, strict=True)), target
        )


def small_tensors(state: Mapping[str, Any], table: TensorTable) -> tuple[dict[str, PieceTable], dict[str, Any]]:
    """Return where the small tensors of `state` are, by file, and all other entries of `state`.

    The tensors must outlive the pieces: they hold addresses in their memory.
    """
    kinds, places = table.kinds, table.places
    # Complex tensors may be lazy conjugates: the bytes in their memory are not their elements.
    columns: dict[TensorKind, tuple[list[int], list[int]]] = {
        kind: ([], []) for kind in table.places_by_kind if 0 < kind.nbytes <= SMALL_BYTES and not kind.dtype.is_complex
    }
    others: dict[str, Any] = {}
    strided = torch.strided
    for key, target in state.items():
        kind = kinds.get(key)
        if (
            kind in columns
            and type(target) in PLAIN_TENSORS
            and target.dtype is kind.dtype
            and target.is_cpu
            and target.layout is strided
            and target.is_contiguous()
            and target.shape == kind.shape
            and not target.is_neg()
        ):
            begins, addresses = columns[kind]
            begins.append(places[key])
            addresses.append(target.data_ptr())
        else:
            others[key] = target
    tables: dict[str, PieceTable] = {}
    for kind, (begins, addresses) in columns.items():
        if begins:
            tables.setdefault(kind.file, PieceTable()).add(begins, addresses, kind.nbytes)
    return tables, others


class StoredBox(NamedTuple):
    """A box of elements in a file: the first at byte `at`, the others at `strides`, counted in elements."""

    file: str
    at: int
    dtype: torch.dtype
    shape: Shape
    strides: Shape

    def part(self, offsets: Shape, shape: Shape) -> StoredBox:
        """Return the box of `shape` at `offsets` in this one. Raises ValueError if it is not inside."""
        if not is_inside(offsets, shape, self.shape):
            raise ValueError(f"{list(shape)} at {list(offsets)} is not inside {list(self.shape)} of {self.file}")
        skipped = sum(offset * stride for offset, stride in zip(offsets, self.strides, strict=True))
        return StoredBox(self.file, self.at + skipped * self.dtype.itemsize, self.dtype, shape, self.strides)

    @property
    def nbytes(self) -> int:
        """The number of bytes from its first element to the end of its last."""
        return (sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1) * self.dtype.itemsize


def whole(chunk: Chunk, dtype: torch.dtype, target: torch.Tensor, ring: DeviceRing) -> Piece | None:
    """Return the piece that reads all of `chunk` directly into `target`; None if one plain read cannot do it."""
    if chunk.at is None or target.dtype is not dtype or target.shape != chunk.sizes or not target.is_contiguous():
        return None
    piece_of = _piece_of(target, ring)
    return None if piece_of is None else piece_of(chunk.at, 0, target.nbytes)


def straight(source: StoredBox, target: torch.Tensor, ring: DeviceRing) -> list[Piece] | None:
    """Return the pieces that read `source` directly into `target`; None if it must be staged.

    `target` must outlive the pieces: they hold addresses in its memory.
    """
    piece_of = None if target.dtype is not source.dtype else _piece_of(target, ring)
    if piece_of is None:
        return None
    itemsize = source.dtype.itemsize
    if target.is_contiguous() and source.strides == row_major_strides(source.shape):
        return [piece_of(source.at, 0, math.prod(source.shape) * itemsize)]
    runs = _contiguous_runs(source.shape, source.strides, target.stride())
    if runs is None:
        return None
    length, dims = runs
    num_bytes = length * itemsize
    smallest_step = min((stride for _, stride, _ in dims), default=length) * itemsize
    if dims and num_bytes < _LONG_RUN_BYTES and smallest_step - num_bytes <= GAP_BYTES:
        return None
    pieces = []
    for index in product(*(range(n) for n, _, _ in dims)):
        skipped = sum(i * stride for i, (_, stride, _) in zip(index, dims, strict=True)) * itemsize
        moved = sum(i * stride for i, (_, _, stride) in zip(index, dims, strict=True)) * itemsize
        pieces.append(piece_of(source.at + skipped, moved, num_bytes))
    return pieces


class BufferedPart:
    """A part of a region that goes through a buffer: read the pieces of `begin`, then call `finish`."""

    def __init__(self, source: StoredBox, target: torch.Tensor, ring: DeviceRing) -> None:
        self.file, self.at = source.file, source.at
        self.num_bytes = max(source.nbytes, math.prod(source.shape) * source.dtype.itemsize)
        self._source, self._target, self._ring = source, target, ring
        self._read: torch.Tensor = target

    def begin(self) -> list[Piece]:
        """Allocate a buffer of about `num_bytes`, on the device if the ring leads there; return the pieces for it."""
        source = self._source
        device = self._target.device if self._ring.reaches(self._target) else "cpu"
        self._read = torch.empty(source.shape, dtype=source.dtype, device=device)
        pieces = straight(source, self._read, self._ring)
        if pieces is None:
            span = torch.empty(source.nbytes, dtype=torch.uint8, device=device)
            self._read = span.view(source.dtype).as_strided(source.shape, source.strides)
            pieces = straight(StoredBox(source.file, source.at, span.dtype, span.shape, (1,)), span, self._ring)
            assert pieces is not None
        return pieces

    def finish(self) -> None:
        """Copy the elements to the target and free the buffer."""
        self._target.copy_(self._read)
        self._read = self._target


def staged(source: StoredBox, target: torch.Tensor, ring: DeviceRing) -> Iterator[BufferedPart]:
    """Yield `source`, to be read into `target`, in parts of at most `STAGED_BYTES`. Any dtype, device and layout."""
    shape, itemsize = source.shape, source.dtype.itemsize
    long_dims = [dim for dim, size in enumerate(shape) if size > 1]
    if source.nbytes <= STAGED_BYTES or not long_dims:
        yield BufferedPart(source, target, ring)
        return
    dim = max(long_dims, key=lambda d: (shape[d] - 1) * source.strides[d])
    step = min(max(1, STAGED_BYTES // max(1, source.strides[dim] * itemsize)), shape[dim] - 1)
    for begin in range(0, shape[dim], step):
        size = min(step, shape[dim] - begin)
        offsets = tuple(begin if d == dim else 0 for d in range(len(shape)))
        part = source.part(offsets, (*shape[:dim], size, *shape[dim + 1 :]))
        yield from staged(part, target.narrow(dim, begin, size), ring)


def _piece_of(target: torch.Tensor, ring: DeviceRing) -> Callable[[int, int, int], Piece] | None:
    """Return what makes a piece of a place in the file, one in the memory of `target`, and a number of bytes.

    None if bytes written there would not be its elements, or cannot be written there one after the other.
    """
    if type(target) not in PLAIN_TENSORS or target.is_neg() or target.is_conj() or target.layout is not torch.strided:
        return None
    if ring.reaches(target):
        if not target.is_contiguous():
            return None
        place = ring.place(target)
        return lambda at, begin, num_bytes: Piece(at, place[begin : begin + num_bytes])
    if not target.is_cpu:
        return None
    address = target.data_ptr()
    return lambda at, begin, num_bytes: Piece.of_memory(at, address + begin, num_bytes)


def _contiguous_runs(shape: Shape, source: Shape, target: Shape) -> tuple[int, list[tuple[int, int, int]]] | None:
    """Return (elements contiguous in both, [(size, stride in source, stride in target)] of the other dims).

    The other dims are outermost first. Returns None if one of them has a stride in the file that is not positive.
    """
    dims = [dim for dim in zip(shape, source, target, strict=True) if dim[0] != 1]
    dims.sort(key=lambda dim: dim[1], reverse=True)
    length = 1
    while dims and dims[-1][1] == dims[-1][2] == length:
        length *= dims.pop()[0]
    return (length, dims) if all(stride > 0 for _, stride, _ in dims) else None
