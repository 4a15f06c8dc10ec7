"""Copy the state into memory that training does not change.

The copy is the image of this rank's file, so a writer can give the memory to the disk as it is, without gathering.
The arenas that hold images are kept from save to save, and are made and allocated before the first one: page faults
cost far more than the copy. They are pinned if there is an accelerator. One image is staged at a time: pool.py says
into which arena, and copiers.py how it is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import TypeVar

import torch

from torchtitan_lite.checkpoint.format.file_image import FileImage, FileLayout
from torchtitan_lite.checkpoint.memory.mark import Mark
from torchtitan_lite.checkpoint.staging.arena import StagingArena
from torchtitan_lite.checkpoint.staging.copiers import Copier, CudaCopier, HostCopier
from torchtitan_lite.checkpoint.staging.pool import Pool, Slot
from torchtitan_lite.disk.digest import FileRecord

T = TypeVar("T")

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
    number: int
    """Which of the copies in that place this is."""
    record: FileRecord | None = None
    """The digests of the image; None if whoever reads it is to take them."""

    def tensors(self) -> list[torch.Tensor]:
        """Return the staged tensors, in the order of the file; they share the arena's memory."""
        places = zip(self.layout.places, self.layout.specs, strict=True)
        return [self.arena.tensor(place.data_at, dtype, shape) for place, (dtype, shape) in places]


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
        slots = [slot for slot in self.pool.slots if not (slot.is_read or _has_room(slot, num_bytes))]
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
        """Return the arenas in `descriptors` (memory, mark), which they own; `pool.adopt` puts them to use.

        Closes those of now: the descriptors may be of the same memory, and two arenas of it would overwrite each other.
        """
        self.finish_preparation()
        for arena, _ in self.pool.clear():
            arena.close(is_unused=False)  # A save that the caller stopped waiting for may still be written from it.

        def adopt() -> list[StagingArena]:
            return [StagingArena.adopted(fd, mark_fd, pin=self._pin) for fd, mark_fd in descriptors]

        return self._in_a_thread(adopt).result()

    def shrink(self, num_slots: int, seconds: float) -> None:
        """Have at most `num_slots`, and free the others' arenas once they are not read, after `seconds` at most."""
        if len(self.pool.slots) > num_slots:
            self.finish_preparation()
        for arena, is_read in self.pool.shrink(num_slots, seconds):
            self._give_up(arena)
            arena.close(is_unused=not is_read)

    def close(self) -> None:
        """Free the arenas that no keeper holds; the next `take` makes a new one. Idempotent."""
        self.finish_preparation()
        for arena, is_read in self.pool.clear():
            arena.close(is_unused=not is_read)

    def _stage(self, image: FileImage, slot: Slot, digests: bool) -> Staged:
        if slot.arena is not None and slot.arena.mark is not None:
            slot.arena.mark.clear()  # Before the first byte changes.
        if not _has_room(slot, image.num_bytes):
            self._in_a_thread(lambda: self._make(slot, image.num_bytes)).result()
        arena = slot.arena
        assert arena is not None
        copied = self._copier.copy(image, arena, digests=digests)
        return Staged(arena, image.layout, image.num_bytes, copied.wait, slot, slot.num_copies, copied.record)

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


def build_stager(*, marks: bool = False, give_up: Callable[[StagingArena], None] = _nothing) -> Stager:
    """Return the stager for this machine: pinned memory and CUDA streams if there is CUDA."""
    on_cuda = torch.cuda.is_available()
    return Stager(CudaCopier() if on_cuda else HostCopier(), pin=on_cuda, marks=marks, give_up=give_up)
