"""The bytes of a rank's file, before the file exists.

A `FileLayout` holds the place of each tensor's item in the file; it depends on dtypes and shapes alone,
so it is the same from save to save. A `FileData` is a layout filled with tensors and objects: any
thread can copy any range of its bytes without the rest. The layout covers the file without gaps:
tensors first, objects after them, so that an object which grows moves no tensor.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

import torch
import xxhash

from torchtitan_lite.checkpoint.format.torch_item import ALIGNMENT, Frame, tensor_frame

Spec = tuple[torch.dtype, tuple[int, ...]]
"""dtype and shape of a dense tensor."""
_SMALL_BYTES = 64 << 10
"""Copies up to this size keep the GIL: to take it back from other threads after each takes longer than the copy."""
_copy_small = ctypes.PyDLL(None).memmove
_copy_small.argtypes, _copy_small.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_void_p


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor in a file, in bytes."""

    item_at: int
    data_at: int
    data_bytes: int
    item_bytes: int

    @property
    def data_end(self) -> int:
        """The byte after the last element."""
        return self.data_at + self.data_bytes


def extent_of(spec: Spec) -> tuple[int, int]:
    """Return how many bytes of a tensor's item come before its elements, and how many up to the next item."""
    dtype, shape = spec
    frame = tensor_frame(dtype, shape)
    item_bytes = len(frame.head) + torch.Size(shape).numel() * dtype.itemsize + len(frame.tail)
    return len(frame.head), _aligned(item_bytes)


class FileLayout:
    """The places of tensors with these `specs`, one after another, in a file."""

    def __init__(self, specs: Sequence[Spec]) -> None:
        self.specs = tuple(specs)
        self.places: list[TensorPlace] = []
        self.frames: list[Frame] = []
        at = 0
        for dtype, shape in self.specs:
            frame = tensor_frame(dtype, shape)
            data_bytes = torch.Size(shape).numel() * dtype.itemsize
            item_bytes = len(frame.head) + data_bytes + len(frame.tail)
            self.frames.append(frame)
            self.places.append(TensorPlace(at, at + len(frame.head), data_bytes, item_bytes))
            at += _aligned(item_bytes)
        self.end = at
        """The size of all tensor items in bytes, which is where the objects start."""
        self.starts = [place.item_at for place in self.places]
        gaps = [self.end_of(number) - place.item_at - place.item_bytes for number, place in enumerate(self.places)]
        heads = [*(frame.head for frame in self.frames), b""]
        shared: dict[tuple[bytes, int, bytes], bytes] = {}
        self.tails = _tails(self.frames, gaps, [b""] * len(gaps), shared)
        """What follows the elements of each tensor, up to the next item."""
        self.between = _tails(self.frames, gaps, heads[1:], shared)
        """What lies between the elements of each tensor and those of the next one."""

    def end_of(self, number: int) -> int:
        """Return the byte where the item after number `number` starts."""
        return self.starts[number + 1] if number + 1 < len(self.starts) else self.end


class TensorBytes(NamedTuple):
    """Bytes [begin, end) of the row-major elements of a tensor, and the memory where they belong."""

    tensor: torch.Tensor
    begin: int
    end: int
    room: memoryview

    def copy(self) -> None:
        """Copy them. Any thread."""
        copy_bytes(self.tensor, self.begin, self.end, ctypes.addressof(ctypes.c_char.from_buffer(self.room)))


class FileData:
    """A `layout` filled with `tensors`, in its order, and with `objects`, the bytes of all objects' items.

    `volatile` has the numbers of the tensors that may change before an optimizer steps again. Raises ValueError for a
    tensor whose dtype or shape is not that of the layout: copying it would read beyond the end of its memory.
    """

    def __init__(
        self,
        layout: FileLayout,
        tensors: Sequence[torch.Tensor],
        objects: bytes = b"",
        volatile: AbstractSet[int] = frozenset(),
    ) -> None:
        for number, (tensor, (dtype, shape)) in enumerate(zip(tensors, layout.specs, strict=True)):
            if tensor.dtype is dtype and tensor.shape == shape:
                continue
            if tensor.dtype != dtype or tensor.numel() or 0 not in shape:
                raise ValueError(
                    f"tensor {number} of the file is {tensor.dtype}{list(tensor.shape)} in memory, "
                    f"where the plan has {dtype}{list(shape)}. Call state_dict again and save its result."
                )
        self.layout = layout
        self.volatile = volatile
        # Found out here: in threads that copy, each such question would hand the GIL around.
        self._in_a_row = [_lies_in_a_row(tensor) for tensor in tensors]
        # Of one without a gradient whose memory is read as it lies, a detached one would be the same tensor once more.
        self.tensors = [
            tensor if in_a_row and not tensor.requires_grad else tensor.detach()
            for tensor, in_a_row in zip(tensors, self._in_a_row, strict=True)
        ]
        self.apart: list[torch.Tensor] = []
        """The tensors that do not lie in a row in the CPU's memory, as those of devices."""
        if not all(self._in_a_row):
            self.apart = [t for t, in_a_row in zip(self.tensors, self._in_a_row, strict=True) if not in_a_row]
        self.objects = objects
        self.num_bytes = layout.end + len(objects)

    def fill(self, buffer: memoryview, begin: int, end: int) -> None:
        """Copy bytes [begin, end) of the file to the start of `buffer`. Any thread.

        Takes some MiB of memory for tensors that are not contiguous on the CPU.
        """
        for run in self.fill_in_a_row(buffer, begin, end):
            run.copy()

    def fill_in_a_row(self, buffer: memoryview, begin: int, end: int) -> list[TensorBytes]:
        """Do what `fill` does, but for tensors that do not lie in a row in the CPU's memory: return what is left."""
        left: list[TensorBytes] = []
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) - begin
        starts = self.layout.starts
        first, last = max(0, bisect_right(starts, begin) - 1), bisect_left(starts, end)
        if first < last and starts[first] < begin:
            left += self._fill_part(first, buffer, begin, end)
            first += 1
        if first < last and self.layout.end_of(last - 1) > end:
            last -= 1
            left += self._fill_part(last, buffer, begin, end)
        if first < last:
            left += self._fill_whole(first, last, buffer, address, begin)
        if end > self.layout.end:
            first = max(begin, self.layout.end)
            buffer[first - begin : end - begin] = self.objects[first - self.layout.end : end - self.layout.end]
        return left

    def _fill_whole(self, first: int, last: int, buffer: memoryview, address: int, begin: int) -> list[TensorBytes]:
        """Copy the complete items from number `first` to before `last`, which lie one after another."""
        layout, tensors, in_a_row = self.layout, self.tensors, self._in_a_row
        left: list[TensorBytes] = []
        head = layout.frames[first].head
        _copy_small(address + layout.places[first].item_at, head, len(head))
        for number in range(first, last):
            place, following = layout.places[number], layout.between[number]
            data_at, num_bytes = address + place.data_at, place.data_bytes
            if num_bytes <= _SMALL_BYTES and in_a_row[number]:
                _copy_small(data_at, tensors[number].data_ptr(), num_bytes)
            elif in_a_row[number]:
                ctypes.memmove(data_at, tensors[number].data_ptr(), num_bytes)
            elif num_bytes:
                room = buffer[place.data_at - begin : place.data_end - begin]
                left.append(TensorBytes(tensors[number], 0, num_bytes, room))
            if number + 1 == last:
                following = layout.tails[number]
            _copy_small(data_at + num_bytes, following, len(following))
        return left

    def _fill_part(self, number: int, buffer: memoryview, begin: int, end: int) -> list[TensorBytes]:
        place, frame = self.layout.places[number], self.layout.frames[number]
        _overlay(buffer, begin, end, place.item_at, frame.head)
        _overlay(buffer, begin, end, place.data_end, self.layout.tails[number])
        first, last = max(begin, place.data_at), min(end, place.data_end)
        if first >= last:
            return []
        tensor, room = self.tensors[number], buffer[first - begin : last - begin]
        run = TensorBytes(tensor, first - place.data_at, last - place.data_at, room)
        if not self._in_a_row[number]:
            return [run]
        ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(room)), tensor.data_ptr() + run.begin, len(room))
        return []


def _tails(
    frames: Sequence[Frame], gaps: Sequence[int], heads: Sequence[bytes], shared: dict[tuple[bytes, int, bytes], bytes]
) -> list[bytes]:
    """Return the tail, the gap and the following head of each frame, as one. Equal ones are one object, of `shared`."""
    return [
        shared.setdefault((frame.tail, gap, head), frame.tail + bytes(gap) + head)
        for frame, gap, head in zip(frames, gaps, heads, strict=True)
    ]


def copy_bytes(tensor: torch.Tensor, begin: int, end: int, address: int) -> None:
    """Copy bytes [begin, end) of the row-major elements of `tensor`, on any device, to the memory at `address`."""
    if _lies_in_a_row(tensor):
        ctypes.memmove(address, tensor.data_ptr() + begin, end - begin)
        return
    most = _PIECE_BYTES if tensor.is_cpu else _DEVICE_PIECE_BYTES
    for piece, at in row_major_pieces(tensor, begin, end, most):
        piece = piece.cpu()
        first, last = max(begin, at), min(end, at + piece.nbytes)
        ctypes.memmove(address + first - begin, piece.data_ptr() + first - at, last - first)


def _lies_in_a_row(tensor: torch.Tensor) -> bool:
    """Return whether the bytes of the row-major elements of `tensor` are one range of the CPU's memory."""
    return tensor.is_contiguous() and tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()


_PIECE_BYTES = 1 << 20
"""Size of one intermediate copy. Each thread's allocator keeps several blocks of the size that it served last."""
_DEVICE_PIECE_BYTES = 4 << 20
"""The same for copies from a device, larger because the thread waits for each of them."""


def row_major_pieces(
    tensor: torch.Tensor, begin: int, end: int, most: int = _PIECE_BYTES
) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield row-major copies of slices of `tensor` that cover its bytes [begin, end), each with its first byte.

    They are on its device, and of one that is row-major there is no copy. Each has at most `most` bytes, or one
    element, so memory stays small however large the range is.
    """
    dim = next((d for d, size in enumerate(tensor.shape) if size > 1), None)
    if dim is None:
        yield _row_major_copy(tensor), 0
        return
    row_bytes = tensor.numel() * tensor.element_size() // tensor.shape[dim]
    first, last, step = begin // row_bytes, -(-end // row_bytes), max(1, most // row_bytes)
    for row in range(first, last, step):
        at = row * row_bytes
        rows = tensor.narrow(dim, row, min(step, last - row))
        if row_bytes <= most:
            yield _row_major_copy(rows), at
        else:
            for piece, offset in row_major_pieces(rows, max(begin - at, 0), min(end - at, row_bytes), most):
                yield piece, at + offset


def _row_major_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous()


def elements_digest(tensor: torch.Tensor) -> int:
    """Return a digest of the row-major elements of `tensor`, of any device and memory layout. Any thread."""
    if _lies_in_a_row(tensor):
        return xxhash.xxh3_64_intdigest(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
    digest = xxhash.xxh3_64()
    for piece, _ in row_major_pieces(tensor.detach(), 0, tensor.nbytes, _DEVICE_PIECE_BYTES) if tensor.numel() else ():
        digest.update(piece.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.intdigest()


def _overlay(buffer: memoryview, begin: int, end: int, at: int, data: bytes) -> None:
    """Copy the part of `data` that lies in [begin, end) into `buffer`.

    `buffer` starts at byte `begin` of the file, `data` at byte `at`.
    """
    first, last = max(begin, at), min(end, at + len(data))
    if first < last:
        buffer[first - begin : last - begin] = data[first - at : last - at]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
