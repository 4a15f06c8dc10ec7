"""How a state gets into an arena: by processors, or by streams of accelerators.

A `Copier` copies the bytes of a file and, where processors copy, can also digest them, portion by portion while they
are in the cache of a core: that adds little to the copy, and neither a disk write nor an image in memory has to read
them again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from torchtitan_lite.checkpoint.devices.page_lock import is_cut, pieces
from torchtitan_lite.checkpoint.format.file_data import FileData, FileLayout, TensorPlace, copy_bytes
from torchtitan_lite.checkpoint.staging.arena import StagingArena
from torchtitan_lite.disk.digest import BLOCK_BYTES, BlockDigest, FileRecord
from torchtitan_lite.disk.threads import in_threads

THREADS = 2
"""Two, because one core copies at about half the speed of the memory."""
_PIECE_BYTES = 16 << 20
"""The most that one thread copies at a time."""
_PORTION_BYTES = 512 << 10
"""Bytes copied and then digested: 256 KiB to 512 KiB stay in the cache of a core (1 MiB takes 1.1 times as long)."""


@dataclass(frozen=True)
class Copied:
    """Bytes that are being copied, or have been."""

    wait: Callable[[], None]
    """Blocks until all of it is in the arena, and the state may change."""
    record: FileRecord | None = None
    """The digests of the copy, if they were taken with the copy."""


class Copier(Protocol):
    """Copies files into arenas."""

    can_digest: bool
    """Whether `copy` can take the digests."""

    def copy(self, data: FileData, arena: StagingArena, *, digests: bool) -> Copied:
        """Begin to copy, and take the digests if they are wanted and it can."""


class HostCopier:
    """Copies with two threads while the caller waits."""

    # By hand, 2 GB took 100 ms without and 102 ms with digests where memory was slow, and 1.1 to 1.3 times as long
    # where it was fast. A thread or process that digests the copy later reads all of it from memory again, during the
    # next step.
    can_digest = True

    def copy(self, data: FileData, arena: StagingArena, *, digests: bool) -> Copied:
        # Whole blocks, some for each thread.
        share = -(-data.num_bytes // (4 * THREADS * BLOCK_BYTES)) * BLOCK_BYTES
        piece = max(BLOCK_BYTES, min(_PIECE_BYTES, share))
        begins = range(0, data.num_bytes, piece)
        blocks = [b""] * len(begins)

        def copy(numbered: tuple[int, int]) -> None:
            number, begin = numbered
            end = min(begin + piece, data.num_bytes)
            if digests:
                blocks[number] = _copied_and_digested(data, arena, begin, end)
            else:
                data.fill(arena.memory[begin:end], begin, end)

        in_threads(enumerate(begins), THREADS, lambda: copy)
        record = FileRecord(data.num_bytes, b"".join(blocks)) if digests else None
        return Copied(lambda: None, record)


class CudaCopier:
    """Copies on its own streams, one for each device, while forward and backward run, which needs pinned memory.

    The bytes around the tensors, which no device has, are written once for each layout.

    Tensors that forward may change (buffers) are copied first, and the training stream waits for these copies. Only an
    optimizer changes the others, and the guard makes it wait. The host waits only for copies of tensors in its memory.
    """

    # No core has the bytes in its cache: the accelerator copies them.
    can_digest = False

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, data: FileData, arena: StagingArena, *, digests: bool) -> Copied:
        if data.layout is not arena.framed:
            _frame(data.layout, arena)
            arena.framed = data.layout
        ctypes.memmove(arena.address + data.layout.end, data.objects, len(data.objects))
        on_devices: dict[torch.device, list[int]] = {}
        elsewhere: list[int] = []
        for number, tensor in enumerate(data.tensors):
            (on_devices.setdefault(tensor.device, []) if tensor.is_cuda else elsewhere).append(number)
        done = [self._enqueue_on(device, numbers, data, arena) for device, numbers in on_devices.items()]
        _copy_now(data, arena, elsewhere)
        # Until the copies are done: the allocator must not reuse the memory that they read.
        held = [data]

        def wait() -> None:
            for event in done:
                event.synchronize()
            held.clear()

        return Copied(wait)

    def _enqueue_on(
        self, device: torch.device, numbers: Sequence[int], data: FileData, arena: StagingArena
    ) -> torch.cuda.Event:
        """Enqueue the copies of the tensors on `device`, and return an event behind the last of them."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it so
        stream, training = self._streams[device], torch.cuda.current_stream(device)
        # The kernels that compute the values come first.
        stream.wait_stream(training)
        # One stream for each device: torch puts a copy on the current stream of the device that it reads.
        with torch.cuda.stream(stream):
            _enqueue_copies(data, arena, [number for number in numbers if number in data.volatile])
            training.wait_stream(stream)
            _enqueue_copies(data, arena, [number for number in numbers if number not in data.volatile])
            # With blocking=True a thread that waits sleeps instead of using a core.
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            done.record(stream)
        return done


def _frame(layout: FileLayout, arena: StagingArena) -> None:
    """Write the bytes around the tensors of `layout` to the arena, where they stay from save to save."""
    for number, (place, frame) in enumerate(zip(layout.places, layout.frames, strict=True)):
        tail = frame.tail + bytes(layout.end_of(number) - place.item_at - place.item_bytes)
        ctypes.memmove(arena.address + place.item_at, frame.head, len(frame.head))
        ctypes.memmove(arena.address + place.data_end, tail, len(tail))


def _copied_and_digested(data: FileData, arena: StagingArena, begin: int, end: int) -> bytes:
    """Copy bytes [begin, end) of `data` to `arena`, and return the digests of their blocks. Any thread."""
    blocks = []
    for block in range(begin, end, BLOCK_BYTES):
        digest = BlockDigest()
        for at in range(block, min(block + BLOCK_BYTES, end), _PORTION_BYTES):
            last = min(at + _PORTION_BYTES, end)
            portion = arena.memory[at:last]
            data.fill(portion, at, last)
            digest.update(portion)
        blocks.append(digest.digest())
    return b"".join(blocks)


def _copy_now(data: FileData, arena: StagingArena, numbers: Sequence[int]) -> None:
    """Copy the tensors with these numbers to `arena`, with `THREADS` threads, and wait."""

    def copy(piece: tuple[torch.Tensor, int, int, TensorPlace]) -> None:
        tensor, begin, end, place = piece
        copy_bytes(tensor, begin, end, arena.address + place.data_at + begin)

    in_threads(_copy_pieces(data, numbers), THREADS, lambda: copy)


def _enqueue_copies(data: FileData, arena: StagingArena, numbers: Sequence[int]) -> None:
    """Enqueue copies of the tensors with these numbers, all on one device, on its current stream."""
    targets = arena.tensors(data.layout)
    for number in numbers:
        # For a lazy conjugate torch would conjugate the target in place, before the copy is complete.
        source, place = data.tensors[number].resolve_conj().resolve_neg(), data.layout.places[number]
        if not is_cut(place.data_at, place.data_end):
            targets[number].copy_(source, non_blocking=True)
            continue
        of_bytes = source.contiguous().view(-1).view(torch.uint8)
        for begin, end in pieces(place.data_at, place.data_end):
            part = of_bytes[begin - place.data_at : end - place.data_at]
            arena.tensor(begin, torch.uint8, part.shape).copy_(part, non_blocking=True)


def _copy_pieces(data: FileData, numbers: Sequence[int]) -> Iterator[tuple[torch.Tensor, int, int, TensorPlace]]:
    for number in numbers:
        tensor, place = data.tensors[number], data.layout.places[number]
        for begin in range(0, place.data_bytes, _PIECE_BYTES):
            yield tensor, begin, min(begin + _PIECE_BYTES, place.data_bytes), place


def build_copier() -> Copier:
    """Return the copier for this machine."""
    return CudaCopier() if torch.cuda.is_available() else HostCopier()
