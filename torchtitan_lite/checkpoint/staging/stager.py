"""Copy the state into memory that training does not change.

The copy is the image of this rank's file, so a writer can give the memory to the disk as it is, without
gathering. The arena that holds the image is kept from save to save, and is made and touched before the
first one: page faults of untouched memory cost far more than the copy. A writer process can map it (a
memfd has no name, so no crash leaves anything behind, and the limit of /dev/shm does not apply). It is
pinned if there is an accelerator. One image is staged at a time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torchtitan_lite.checkpoint.format.file_image import FileImage, FileLayout, Place, copy_bytes
from torchtitan_lite.disk.in_threads import in_threads
from torchtitan_lite.log import logger

THREADS = 2
"""Two, because one core copies at about half the speed of the memory."""
_PIECE_BYTES = 16 << 20
"""The size of one copy by one thread."""
_GRAIN_BYTES = 2 << 20
"""The size of an arena is a multiple of it: the size of a huge page, and room for objects that grow."""


class StagingArena:
    """Page-aligned memory of `num_bytes`. Another process can map it through `fd`."""

    def __init__(self, num_bytes: int, *, pin: bool) -> None:
        self.num_bytes = num_bytes
        self._pid = os.getpid()
        self.fd = _anonymous_file(num_bytes)
        self.memory = mmap.mmap(self.fd, max(num_bytes, 1))
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self._pinned = pin and num_bytes > 0 and _pin(self.address, num_bytes)

    def touch(self) -> None:
        """Write to every page, so that the kernel allocates it. Any thread; releases the GIL."""
        for at in range(0, self.num_bytes, _PIECE_BYTES):
            ctypes.memset(self.address + at, 0, min(_PIECE_BYTES, self.num_bytes - at))

    def tensor(self, at: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the tensor at byte `at`, which shares the arena's memory."""
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=at).view(tuple(shape))

    def close(self) -> None:
        """Free the memory: no code may use it afterwards. Idempotent."""
        if self._pinned:
            _cudart().cudaHostUnregister(self.address)
            self._pinned = False
        if self.fd >= 0:
            # A writer process or a forked worker may still have it open or mapped: truncating frees the memory anyway.
            # Only the process that made it does so: a forked worker must not truncate the arena of its parent.
            if os.getpid() == self._pid:
                os.ftruncate(self.fd, 0)
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True)
class Staged:
    """An image in an arena."""

    arena: StagingArena
    layout: FileLayout
    num_bytes: int
    wait: Callable[[], None]
    """Blocks until the whole image is in the arena. Any thread."""

    def tensors(self) -> list[torch.Tensor]:
        """Return the staged tensors, in the order of the file; they share the arena's memory."""
        places = zip(self.layout.places, self.layout.specs, strict=True)
        return [self.arena.tensor(place.data_at, dtype, shape) for place, (dtype, shape) in places]


class Copier(Protocol):
    """Copies tensors into an arena."""

    def copy(self, image: FileImage, arena: StagingArena) -> Callable[[], None]:
        """Begin to copy, and return a function that blocks until the state may change."""


class Stager:
    """Copies images into an arena that it keeps from save to save."""

    def __init__(self, copier: Copier, *, pin: bool) -> None:
        self._copier = copier
        self._pin = pin
        self._preparation: Future[StagingArena] | None = None
        self._framed: FileLayout | None = None
        self.arena: StagingArena | None = None
        """The arena with the last image; None before the first one and after `close`."""

    def prepare(self, num_bytes: int) -> None:
        """Make and touch an arena for images of about `num_bytes` in a thread; the first `take` waits for it."""
        if self._preparation is None and not self._has_room(num_bytes):
            self._preparation = self._start_making(num_bytes)

    def take(self, image: FileImage) -> Staged:
        """Begin to copy `image`. No code may still need the previous image. Main thread."""
        self._finish_preparation()
        if not self._has_room(image.num_bytes):
            self._start_making(image.num_bytes).result()
        arena = self.arena
        assert arena is not None
        if image.layout is not self._framed:
            self._frame(image.layout, arena)
        ctypes.memmove(arena.address + image.layout.end, image.objects, len(image.objects))
        wait = self._copier.copy(image, arena)
        return Staged(arena, image.layout, image.num_bytes, wait)

    def close(self) -> None:
        """Free the arena; the next `take` makes a new one. Idempotent."""
        self._finish_preparation()
        if self.arena is not None:
            self.arena.close()
        self.arena = self._framed = None

    def _has_room(self, num_bytes: int) -> bool:
        return self.arena is not None and num_bytes <= self.arena.num_bytes

    def _start_making(self, num_bytes: int) -> Future[StagingArena]:
        """Begin to make an arena for `num_bytes` in a thread, because CUDA stores its last error per thread.

        If pinning failed in the caller's thread, the next kernel that training launches would raise that error.
        """
        device = torch.cuda.current_device() if self._pin else None
        making: Future[StagingArena] = Future()

        def make() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # Each thread starts with device 0.
                making.set_result(self._make_arena(num_bytes))
            except BaseException as error:
                making.set_exception(error)

        threading.Thread(target=make, name="staging", daemon=True).start()
        return making

    def _make_arena(self, num_bytes: int) -> StagingArena:
        if self.arena is not None:
            self.arena.close()  # Before the new one is made: there may be no memory for two.
        self.arena = self._framed = None
        arena = StagingArena(-(-(num_bytes + _GRAIN_BYTES) // _GRAIN_BYTES) * _GRAIN_BYTES, pin=self._pin)
        arena.touch()
        self.arena = arena
        return arena

    def _finish_preparation(self) -> None:
        if self._preparation is not None:
            wait_for([self._preparation])  # Its error is ignored: the save makes the arena again and raises it.
            self._preparation = None

    def _frame(self, layout: FileLayout, arena: StagingArena) -> None:
        """Write the bytes around the tensors of `layout` to the arena, where they stay from save to save."""
        for number, (place, frame) in enumerate(zip(layout.places, layout.frames, strict=True)):
            tail = frame.tail + bytes(layout.end_of(number) - place.item_at - place.item_bytes)
            ctypes.memmove(arena.address + place.item_at, frame.head, len(frame.head))
            ctypes.memmove(arena.address + place.data_end, tail, len(tail))
        self._framed = layout


class HostCopier:
    """Copies with two threads while the caller waits."""

    def copy(self, image: FileImage, arena: StagingArena) -> Callable[[], None]:
        _copy_now(image, arena, range(len(image.tensors)))
        return _nothing_to_wait_for


class CudaCopier:
    """Copies on its own streams, one for each device, while forward and backward run, which needs pinned memory.

    Tensors that forward may change (buffers) are copied first, and the training stream waits for these copies. Only an
    optimizer changes the others, and the guard makes it wait. The host waits only for copies of tensors in its memory.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, image: FileImage, arena: StagingArena) -> Callable[[], None]:
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

        return wait

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


def build_stager() -> Stager:
    """Return the stager for this machine: pinned memory and CUDA streams if there is CUDA."""
    on_cuda = torch.cuda.is_available()
    return Stager(CudaCopier() if on_cuda else HostCopier(), pin=on_cuda)


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


def _anonymous_file(num_bytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("torchtitan_lite-staging")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, max(num_bytes, 1))
    return fd


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _pin(address: int, num_bytes: int) -> bool:
    portable = 1  # Pinned for every device's context.
    result = _cudart().cudaHostRegister(address, num_bytes, portable)
    if int(result) != 0:
        logger.warning("Staging memory could not be pinned (CUDA error %d); copies to it will be slower", int(result))
    return int(result) == 0
