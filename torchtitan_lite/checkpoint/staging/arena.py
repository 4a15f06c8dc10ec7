"""Memory for a copy of a rank's file, which another process can map.

A memfd has no name, so no crash leaves anything behind, and the limit of /dev/shm does not apply. An arena that a
keeper holds outlives its trainer: it is never truncated here, whatever ends the trainer. Its mark says whether the
image in it is valid; whoever changes a byte of the arena clears the mark first. Forked children have no mapping of it.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtitan_lite.checkpoint.devices.page_lock import LockedPages, PageLock, pieces
from torchtitan_lite.checkpoint.format.file_data import FileLayout
from torchtitan_lite.checkpoint.staging.mark import Mark
from torchtitan_lite.disk.forks import forget_in_children
from torchtitan_lite.disk.shared_memory import address_of, allocate, map_shared


class StagingArena:
    """Memory of `num_bytes`, aligned to a huge page. Another process can map it through `fd`.

    `fd`, which the arena then owns, is the memory of an arena of another process, all of it. `mark` is that of its
    image; without one it holds no image for later starts. `allocate` and `lock_pages` lock its pages with `page_lock`.
    """

    def __init__(
        self, num_bytes: int, *, page_lock: PageLock | None = None, fd: int | None = None, mark: Mark | None = None
    ) -> None:
        self.num_bytes = num_bytes
        self.mark = mark
        self.is_kept = False
        """Whether a keeper holds it."""
        self.framed: FileLayout | None = None
        """The layout of which it has the bytes around the tensors, for whoever copies only these."""
        self._tensors_of: tuple[FileLayout, list[torch.Tensor]] | None = None
        self._pid = os.getpid()
        self.fd = _anonymous_file() if fd is None else fd
        found = os.fstat(self.fd)
        self.identity = found.st_dev, found.st_ino
        """What only arenas of the same memory share, as long as that memory exists."""
        try:
            if fd is None:
                os.ftruncate(self.fd, max(num_bytes, 1))
            self.memory = map_shared(self.fd, num_bytes)
        except OSError:
            os.close(self.fd)
            if mark is not None:
                mark.close()
            raise
        self.address = address_of(self.memory)
        self._pages = LockedPages(self.memory, page_lock)
        self.is_closed = False
        """Whether it was given up: its memory may still be on the way out."""
        forget_in_children(self.forget)

    @classmethod
    def adopted(cls, fd: int, mark_fd: int, *, page_lock: PageLock | None = None) -> StagingArena:
        """Return the arena in `fd`, whose image has its mark in `mark_fd`; it owns both. Its pages are allocated."""
        return cls(os.fstat(fd).st_size, page_lock=page_lock, fd=fd, mark=Mark(mark_fd))

    def allocate(self) -> None:
        """Have the kernel give all pages now, huge ones if it can, and lock them. Any thread; releases the GIL."""
        for begin, end in pieces(0, self.num_bytes):
            allocate(self.memory[begin:end])
            self._pages.lock(begin, end)

    def lock_pages(self) -> None:
        """Lock the pages, which are there, unless they are locked. Any thread; releases the GIL."""
        if self._pages.is_empty:
            for begin, end in pieces(0, self.num_bytes):
                self._pages.lock(begin, end)

    def tensors(self, layout: FileLayout) -> list[torch.Tensor]:
        """Return the tensors of `layout`, which share the arena's memory. They are made once for each layout."""
        kept = self._tensors_of
        if kept is None or kept[0] is not layout:
            places = zip(layout.places, layout.specs, strict=True)
            with torch.inference_mode(False):  # Else a save outside of it could not change them.
                made = [self.tensor(place.data_at, dtype, shape) for place, (dtype, shape) in places]
            self._tensors_of = kept = layout, made
        return kept[1]

    def tensor(self, at: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the tensor at byte `at`, which shares the arena's memory."""
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=at).view(tuple(shape))

    def close(self, *, is_unused: bool = True) -> None:
        """Free the memory unless a keeper holds it: no code may use it afterwards. Idempotent.

        With `is_unused` false a thread may still read it, and it is freed with the last mapping. Locked pages are
        unlocked and freed in the background.
        """
        if self.is_closed:
            return
        self.is_closed = True
        self._tensors_of = None
        # Only the process that made it frees it: a forked worker must not truncate the arena of its parent.
        frees = is_unused and os.getpid() == self._pid and not self.is_kept
        if self._pages.is_empty:
            self._free(frees)
        else:
            self._pages.unlock_in_background(lambda: self._free(frees))

    def _free(self, frees: bool) -> None:
        if self.fd >= 0:
            # A writer process or a forked worker may still have it open or mapped: truncating frees the memory anyway.
            if frees:
                os.ftruncate(self.fd, 0)
            self.forget()

    def forget(self) -> None:
        """Close the descriptors, and leave the memory to others that have it open. Idempotent."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)
        if self.mark is not None:
            self.mark.close()
        self._pages.forget()


def _anonymous_file() -> int:
    try:
        # A file in /dev/shm has a name, which outlives a killed process; containers limit that folder to 64 MiB, and
        # logind may empty it at a logout.
        return os.memfd_create("torchtitan_lite-staging")
    except (AttributeError, OSError):  # Not Linux, or a sandbox refuses it.
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


# Where the arenas of a rank are: one slot, whose copy each save replaces.
#
# A slot counts who still reads the copy in it. A run that keeps its copies for later starts has several slots, and a
# rule for which of them a copy may replace: `images/pool.py`.


NO_STEP = -1


@dataclass
class ArenaSlot:
    """The place of an arena, once that is made."""

    arena: StagingArena | None = None
    step: int = NO_STEP
    """The step copied last; `NO_STEP` for none."""
    is_valid: bool = False
    """Whether a later start could resume from the copy."""
    num_readers: int = 0
    num_copies: int = 0
    """The copies that were begun in it: the last one has this number."""

    @property
    def is_read(self) -> bool:
        """Return whether a disk write or a digest needs what is in it."""
        return self.num_readers > 0


class Slots:
    """The slots of this rank. Any thread, if not said otherwise."""

    def __init__(self) -> None:
        self.slots = [ArenaSlot()]
        self._changed = threading.Condition()

    def take(self, step: int, seconds: float = 0.0) -> ArenaSlot:
        """Return the slot for the copy of `step`, with one reader. Raises TimeoutError if none is free in `seconds`.

        What was in it is overwritten from now on. Main thread.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._free_slot() is not None, seconds):
                raise TimeoutError(f"no staging memory for step {step}: earlier copies are still being read")
            slot = self._free_slot()
            assert slot is not None
            slot.step, slot.is_valid, slot.num_readers = step, False, 1
            slot.num_copies += 1
            return slot

    def wait_until_unread(self, seconds: float) -> None:
        """Wait up to `seconds` until no disk write and no digest reads an arena. Main thread."""
        with self._changed:
            self._changed.wait_for(lambda: not any(slot.is_read for slot in self.slots), seconds)

    def add_reader(self, slot: ArenaSlot) -> None:
        """Note that one more reader needs what is in `slot`."""
        with self._changed:
            slot.num_readers += 1

    def release(self, slot: ArenaSlot) -> None:
        """Note that a reader of `slot` is done."""
        with self._changed:
            slot.num_readers = max(0, slot.num_readers - 1)
            self._changed.notify_all()

    def clear(self) -> list[tuple[StagingArena, bool]]:
        """Return all arenas, which the caller closes, and whether each is still read. Main thread.

        There are as many slots as before, without an arena and a copy.
        """
        with self._changed:
            arenas = [(slot.arena, slot.is_read) for slot in self.slots if slot.arena is not None]
            for slot in self.slots:
                slot.arena, slot.step, slot.is_valid = None, NO_STEP, False
                slot.num_copies += 1
            self.slots = [ArenaSlot() for _ in self.slots]
            return arenas

    def _free_slot(self) -> ArenaSlot | None:
        """Return the slot to overwrite now, None for none. A save waits for the one before it: one slot is free."""
        return self.slots[0]
