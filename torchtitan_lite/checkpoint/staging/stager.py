"""Copy the state into memory that training does not change.

The copy is the image of this rank's file, so a writer can give the memory to the disk as it is, without gathering.
Where processors copy they can also digest, portion by portion while it is in the cache of a core: that adds little to
the copy, and neither a disk write nor an image in memory has to read it again. The arenas that hold images are kept
from save to save, and are made and allocated before the first one: page faults cost far more than the copy. They are
pinned if there is an accelerator. One image is staged at a time; pool.py says into which arena.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from torchtitan_lite.checkpoint.format.file_image import FileImage, FileLayout, Place, copy_bytes
from torchtitan_lite.checkpoint.memory.mark import Mark
from torchtitan_lite.checkpoint.staging.arena import StagingArena
from torchtitan_lite.checkpoint.staging.pool import Pool, Slot
from torchtitan_lite.disk.digest import BLOCK_BYTES, BlockDigest, FileRecord
from torchtitan_lite.disk.in_threads import in_threads

T = TypeVar("T")

THREADS = 2
"""Two, because one core copies at about half the speed of the memory."""
_PIECE_BYTES = 16 << 20
"""The most that one thread copies at a time."""
_PORTION_BYTES = 512 << 10
"""Bytes copied and then digested: 256 KiB to 512 KiB stay in the cache of a core (1 MiB takes 1.1 times as long)."""
_GRAIN_BYTES = 2 << 20
"""The size of an arena is a multiple of it: the size of a huge page, and room for objects that grow."""


@dataclass(frozen=True)
class Staged:
    """An image in an arena."""

    arena: StagingArena
    layout: FileLayout
    num_bytes: int
    wait: Callable[[], None]
    """Blocks until the whole image is in the arena. Any thread."""
    slot: Slot
    """The arena's place in the pool; its reader is who took the image."""
    record: FileRecord | None = None
    """The digests of the image; None if whoever reads it is to take them."""

    def tensors(self) -> list[torch.Tensor]:
        """Return the staged tensors, in the order of the file; they share the arena's memory."""
        places = zip(self.layout.places, self.layout.specs, strict=True)
        return [self.arena.tensor(place.data_at, dtype, shape) for place, (dtype, shape) in places]


@dataclass(frozen=True)
class Copied:
    """An image that is being copied, or has been."""

    wait: Callable[[], None]
    """Blocks until the whole image is in the arena, and the state may change."""
    record: FileRecord | None = None
    """The digests of the image, if they were taken with the copy."""


class Copier(Protocol):
    """Copies images into arenas."""

    can_digest: bool
    """Whether `copy` can take the digests."""

    def copy(self, image: FileImage, arena: StagingArena, *, digests: bool) -> Copied:
        """Begin to copy, and take the digests if they are wanted and it can."""


def _nothing(arena: StagingArena) -> None:
    """Do nothing about an arena that is given up."""


class Stager:
    """Copies images into the arenas of `pool`, which it keeps from save to save.

    With `marks` each arena has a mark, so that later starts can use its image. `give_up` is called with an arena before
    another one takes its place: a keeper must let go of it.
    """

    def __init__(
        self,
        copier: Copier,
        *,
        pin: bool,
        marks: bool = False,
        give_up: Callable[[StagingArena], None] = _nothing,
    ) -> None:
        self._copier = copier
        self._pin = pin
        self._marks = marks
        self._give_up = give_up
        self._preparation: Future[None] | None = None
        self.pool = Pool()
        self.arena: StagingArena | None = None
        """The arena with the last image; None before the first one and after `close`."""

    @property
    def can_digest(self) -> bool:
        """Return whether copies can come with their digests."""
        return self._copier.can_digest

    @property
    def is_preparing(self) -> bool:
        """Return whether arenas are still being made: `take` would wait for them."""
        return self._preparation is not None and not self._preparation.done()

    def prepare(self, num_bytes: int) -> None:
        """Make and touch arenas for images of about `num_bytes` in a thread; the first `take` waits for it."""
        slots = [slot for slot in self.pool.slots if not _has_room(slot, num_bytes)]
        if self._preparation is None and slots:
            self._preparation = self._in_a_thread(lambda: self._make_all(slots, num_bytes))

    def take(self, image: FileImage, step: int = 0, seconds: float = 0.0, *, digests: bool = False) -> Staged:
        """Begin to copy `image`, that of `step`, into an arena that may be overwritten. Main thread.

        With one arena no code may still need the previous image. With more, waits up to `seconds` for one, then raises
        TimeoutError. With `digests` they are taken with the copy, if that is possible. The caller calls `pool.release`
        with the slot when it needs the copy no longer.
        """
        self.finish_preparation()
        slot = self.pool.take(step, seconds)
        try:
            return self._stage(image, slot, digests)
        except BaseException:
            self.pool.release(slot)
            raise

    def finish_preparation(self) -> None:
        """Wait until the arenas of `prepare` are made."""
        if self._preparation is not None:
            wait_for([self._preparation])  # Its error is ignored: the save makes the arena again and raises it.
            self._preparation = None

    def adopt(self, descriptors: Sequence[tuple[int, int]]) -> list[StagingArena]:
        """Return the arenas in `descriptors` (memory, mark), which they own; `pool.adopt` puts them to use."""

        def adopt() -> list[StagingArena]:
            return [StagingArena.adopted(fd, mark_fd, pin=self._pin) for fd, mark_fd in descriptors]

        return self._in_a_thread(adopt).result()

    def close(self) -> None:
        """Free the arenas that no keeper holds; the next `take` makes a new one. Idempotent."""
        self.finish_preparation()
        for slot in self.pool.slots:
            if slot.arena is not None:
                slot.arena.close()
            slot.arena = None
        self.arena = None

    def _stage(self, image: FileImage, slot: Slot, digests: bool) -> Staged:
        if slot.arena is not None and slot.arena.mark is not None:
            slot.arena.mark.clear()  # Before the first byte changes.
        if not _has_room(slot, image.num_bytes):
            self._in_a_thread(lambda: self._make(slot, image.num_bytes)).result()
        arena = slot.arena
        assert arena is not None
        self.arena = arena
        copied = self._copier.copy(image, arena, digests=digests)
        return Staged(arena, image.layout, image.num_bytes, copied.wait, slot, copied.record)

    def _in_a_thread(self, work: Callable[[], T]) -> Future[T]:
        """Begin `work`, which makes arenas, in a thread, because CUDA stores its last error per thread.

        If pinning failed in the caller's thread, the next kernel that training launches would raise that error.
        """
        device = torch.cuda.current_device() if self._pin else None
        making: Future[T] = Future()

        def make() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # Each thread starts with device 0.
                making.set_result(work())
            except BaseException as error:
                making.set_exception(error)

        threading.Thread(target=make, name="staging", daemon=True).start()
        return making

    def _make_all(self, slots: Sequence[Slot], num_bytes: int) -> None:
        for slot in slots:
            self._make(slot, num_bytes)

    def _make(self, slot: Slot, num_bytes: int) -> None:
        if slot.arena is not None:
            self._give_up(slot.arena)
            slot.arena.close()  # Before the new one is made: there may be no memory for two.
        slot.arena = None
        mark = _new_mark() if self._marks else None
        arena = StagingArena(-(-(num_bytes + _GRAIN_BYTES) // _GRAIN_BYTES) * _GRAIN_BYTES, pin=self._pin, mark=mark)
        arena.allocate()
        slot.arena = arena


def _new_mark() -> Mark | None:
    """Return a mark; None where the system has no memfds: then the arena is a temporary file, and no image."""
    try:
        return Mark()
    except (AttributeError, OSError):
        return None


def _has_room(slot: Slot, num_bytes: int) -> bool:
    return slot.arena is not None and num_bytes <= slot.arena.num_bytes


def _frame(layout: FileLayout, arena: StagingArena) -> None:
    """Write the bytes around the tensors of `layout` to the arena, where they stay from save to save."""
    for number, (place, frame) in enumerate(zip(layout.places, layout.frames, strict=True)):
        tail = frame.tail + bytes(layout.end_of(number) - place.item_at - place.item_bytes)
        ctypes.memmove(arena.address + place.item_at, frame.head, len(frame.head))
        ctypes.memmove(arena.address + place.data_end, tail, len(tail))


class HostCopier:
    """Copies with two threads while the caller waits."""

    can_digest = True

    def copy(self, image: FileImage, arena: StagingArena, *, digests: bool) -> Copied:
        share = -(-image.num_bytes // (4 * THREADS * BLOCK_BYTES)) * BLOCK_BYTES  # Whole blocks, some for each thread.
        piece = max(BLOCK_BYTES, min(_PIECE_BYTES, share))
        begins = range(0, image.num_bytes, piece)
        blocks = [b""] * len(begins)

        def copy(numbered: tuple[int, int]) -> None:
            number, begin = numbered
            end = min(begin + piece, image.num_bytes)
            if digests:
                blocks[number] = _copied_and_digested(image, arena, begin, end)
            else:
                image.fill(arena.memory[begin:end], begin, end)

        in_threads(enumerate(begins), THREADS, lambda: copy)
        record = FileRecord(image.num_bytes, b"".join(blocks)) if digests else None
        return Copied(_nothing_to_wait_for, record)


class CudaCopier:
    """Copies on its own streams, one for each device, while forward and backward run, which needs pinned memory.

    The bytes around the tensors, which no device has, are written once for each layout.

    Tensors that forward may change (buffers) are copied first, and the training stream waits for these copies. Only an
    optimizer changes the others, and the guard makes it wait. The host waits only for copies of tensors in its memory.
    """

    can_digest = False

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, image: FileImage, arena: StagingArena, *, digests: bool) -> Copied:
        if image.layout is not arena.framed:
            _frame(image.layout, arena)
            arena.framed = image.layout
        ctypes.memmove(arena.address + image.layout.end, image.objects, len(image.objects))
        on_devices: dict[torch.device, list[int]] = {}
        elsewhere: list[int] = []
        for number, tensor in enumerate(image.tensors):
            (on_devices.setdefault(tensor.device, []) if tensor.is_cuda else elsewhere).append(number)
        done = [self._enqueue_on(device, numbers, image, arena) for device, numbers in on_devices.items()]
        _copy_now(image, arena, elsewhere)
        held = [image]  # Until the copies are done: the allocator must not reuse the memory that they read.

        def wait() -> None:
            for event in done:
                event.synchronize()
            held.clear()

        return Copied(wait)

    def _enqueue_on(
        self, device: torch.device, numbers: Sequence[int], image: FileImage, arena: StagingArena
    ) -> torch.cuda.Event:
        """Enqueue the copies of the tensors on `device`, and return an event behind the last of them."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it so
        stream, training = self._streams[device], torch.cuda.current_stream(device)
        stream.wait_stream(training)  # The kernels that compute the values come first.
        # One stream for each device: torch puts a copy on the current stream of the device that it reads.
        with torch.cuda.stream(stream):
            _enqueue_copies(image, arena, [number for number in numbers if number in image.volatile])
            training.wait_stream(stream)
            _enqueue_copies(image, arena, [number for number in numbers if number not in image.volatile])
            # With blocking=True a thread that waits sleeps instead of using a core.
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            done.record(stream)
        return done


def build_stager(*, marks: bool = False, give_up: Callable[[StagingArena], None] = _nothing) -> Stager:
    """Return the stager for this machine: pinned memory and CUDA streams if there is CUDA."""
    on_cuda = torch.cuda.is_available()
    return Stager(CudaCopier() if on_cuda else HostCopier(), pin=on_cuda, marks=marks, give_up=give_up)


def _copied_and_digested(image: FileImage, arena: StagingArena, begin: int, end: int) -> bytes:
    """Copy bytes [begin, end) of `image` to `arena`, and return the digests of their blocks. Any thread."""
    blocks = []
    for block in range(begin, end, BLOCK_BYTES):
        digest = BlockDigest()
        for at in range(block, min(block + BLOCK_BYTES, end), _PORTION_BYTES):
            last = min(at + _PORTION_BYTES, end)
            portion = arena.memory[at:last]
            image.fill(portion, at, last)
            digest.update(portion)
        blocks.append(digest.digest())
    return b"".join(blocks)


def _copy_now(image: FileImage, arena: StagingArena, numbers: Sequence[int]) -> None:
    """Copy the tensors with these numbers to `arena`, with `THREADS` threads, and wait."""

    def copy(piece: tuple[torch.Tensor, int, int, Place]) -> None:
        tensor, begin, end, place = piece
        copy_bytes(tensor, begin, end, arena.address + place.data_at + begin)

    in_threads(_pieces(image, numbers), THREADS, lambda: copy)


def _enqueue_copies(image: FileImage, arena: StagingArena, numbers: Sequence[int]) -> None:
    """Enqueue copies of the tensors with these numbers, all on one device, on its current stream."""
    for number in numbers:
        dtype, shape = image.layout.specs[number]
        target = arena.tensor(image.layout.places[number].data_at, dtype, shape)
        # For a lazy conjugate torch would conjugate the target in place, before the copy is complete.
        target.copy_(image.tensors[number].resolve_conj().resolve_neg(), non_blocking=True)


def _nothing_to_wait_for() -> None:
    """Do nothing: the copies are complete."""


def _pieces(image: FileImage, numbers: Sequence[int]) -> Iterator[tuple[torch.Tensor, int, int, Place]]:
    for number in numbers:
        tensor, place = image.tensors[number], image.layout.places[number]
        for begin in range(0, place.data_bytes, _PIECE_BYTES):
            yield tensor, begin, min(begin + _PIECE_BYTES, place.data_bytes), place
