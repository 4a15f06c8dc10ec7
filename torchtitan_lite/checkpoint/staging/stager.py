"""Copy the state into memory that training does not change.

The copy has the layout of this rank's file, so a writer can give the memory to the disk as it is, without gathering.
The arenas that hold copies are kept from save to save, and are made and allocated before the first one: page faults
cost far more than the copy. Their pages are locked if there is a GPU. One copy is made at a time: arena.py says
into which arena, and copiers.py how.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from torchtitan_lite.checkpoint.devices.page_lock import PageLock, build_page_lock, wait_for_unlocking
from torchtitan_lite.checkpoint.format.file_data import FileData, FileLayout, elements_digest
from torchtitan_lite.checkpoint.staging.arena import ArenaSlot, Slots, StagingArena
from torchtitan_lite.checkpoint.staging.copiers import Copier, build_copier
from torchtitan_lite.checkpoint.staging.mark import Mark
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.threads import in_a_thread
from torchtitan_lite.disk.writer_process import WriterProcess
from torchtitan_lite.log import listed, logger

T = TypeVar("T")

_GRAIN_BYTES = 2 << 20
"""The size of an arena is a multiple of it: the size of a huge page, and room for objects that grow."""
_LONG_WAIT_SECONDS = 0.1
"""A shorter wait for memory is not worth a line."""


@dataclass(frozen=True)
class StagedCopy:
    """A copy in an arena: the bytes of a rank's file."""

    arena: StagingArena
    layout: FileLayout
    num_bytes: int
    wait: Callable[[], None]
    """Blocks until the complete copy is in the arena. Any thread."""
    slot: ArenaSlot
    """The arena's place in the pool; its reader is who took the copy."""
    number: int
    """Which of the copies in that place this is."""
    record: FileRecord | None = None
    """The digests of the copy; None if whoever reads it is to take them."""

    def tensors(self) -> list[torch.Tensor]:
        """Return the staged tensors, in the order of the file; they share the arena's memory."""
        return self.arena.tensors(self.layout)


class Stager:
    """Copies files into the arenas of `pool`, which it keeps from save to save."""

    def __init__(self, copier: Copier, *, page_lock: PageLock | None = None, pool: Slots | None = None) -> None:
        self._copier = copier
        self._page_lock = page_lock
        self._preparation: Future[None] | None = None
        self.pool = pool or Slots()

    @property
    def can_digest(self) -> bool:
        """Return whether copies can come with their digests."""
        return self._copier.can_digest

    @property
    def is_preparing(self) -> bool:
        """Return whether arenas are still being made: `take` would wait for them."""
        return self._preparation is not None and not self._preparation.done()

    def prepare(self, num_bytes: int) -> None:
        """Make arenas for copies of about `num_bytes`, and lock those that are there, in a thread.

        The first `take` waits for it.
        """
        there = [slot.arena for slot in self.pool.slots if slot.arena is not None and _has_room(slot, num_bytes)]
        slots = [slot for slot in self.pool.slots if not (slot.is_read or _has_room(slot, num_bytes))]

        def work() -> None:
            for arena in there:
                arena.lock_pages()
            for slot in slots:
                self._make(slot, num_bytes)

        if self._preparation is None and (slots or (there and self._page_lock is not None)):
            self._preparation = self._in_a_thread(work)

    def take(self, data: FileData, step: int = 0, seconds: float = 0.0, *, digests: bool = False) -> StagedCopy:
        """Begin to copy `data`, that of `step`, into an arena that may be overwritten. Main thread.

        With one arena no code may still need the previous copy. With more, waits up to `seconds` for one, then raises
        TimeoutError. With `digests` they are taken with the copy, if that is possible. The caller calls `pool.release`
        with the slot when it needs the copy no longer.
        """
        self.finish_preparation()
        slot = self.pool.take(step, seconds)
        try:
            return self._stage(data, slot, digests)
        except BaseException:
            self.pool.release(slot)
            raise

    def finish_preparation(self) -> None:
        """Wait until the arenas of `prepare` are made."""
        if self._preparation is not None:
            began = time.monotonic()
            # Its error is ignored: the save makes the arena again and raises it.
            wait_for([self._preparation])
            self._preparation = None
            if (seconds := time.monotonic() - began) >= _LONG_WAIT_SECONDS:
                logger.info("Waited %.1f s until the memory for copies was ready", seconds)

    def close(self) -> None:
        """Give up the arenas; what a keeper holds stays. The next `take` makes a new one. Idempotent."""
        self.finish_preparation()
        for arena, is_read in self.pool.clear():
            arena.close(is_unused=not is_read)

    def _stage(self, data: FileData, slot: ArenaSlot, digests: bool) -> StagedCopy:
        if slot.arena is not None and slot.arena.mark is not None:
            slot.arena.mark.clear()  # Before the first byte changes.
        if not _has_room(slot, data.num_bytes):
            self._in_a_thread(lambda: self._make(slot, data.num_bytes)).result()
        arena = slot.arena
        assert arena is not None
        copied = self._copier.copy(data, arena, digests=digests)
        return StagedCopy(arena, data.layout, data.num_bytes, copied.wait, slot, slot.num_copies, copied.record)

    def _in_a_thread(self, work: Callable[[], T]) -> Future[T]:
        """Begin `work`, which makes arenas, in a thread, because CUDA stores its last error per thread.

        If page-locking failed in the caller's thread, the next kernel that training launches would raise that error.
        """
        begin = bool if self._page_lock is None else self._page_lock.for_thread()
        making: Future[T] = Future()

        def make() -> None:
            try:
                begin()
                making.set_result(work())
            except BaseException as error:
                making.set_exception(error)

        in_a_thread("staging", make)
        return making

    def _make(self, slot: ArenaSlot, num_bytes: int) -> None:
        if slot.arena is not None:
            # Before the new one is made: there may be no memory for two.
            self._give_up(slot.arena)
        slot.arena = None
        wait_for_unlocking()
        num_grains = -(-(num_bytes + _GRAIN_BYTES) // _GRAIN_BYTES)
        arena = StagingArena(num_grains * _GRAIN_BYTES, page_lock=self._page_lock, mark=self._new_mark())
        arena.allocate()
        slot.arena = arena

    def _new_mark(self) -> Mark | None:
        """Return what says to a later start that an arena has an image: here no arena has one."""
        return None

    def _give_up(self, arena: StagingArena) -> None:
        """Free an arena that another one replaces."""
        arena.close()


def _has_room(slot: ArenaSlot, num_bytes: int) -> bool:
    return slot.arena is not None and num_bytes <= slot.arena.num_bytes


def build_stager() -> Stager:
    """Return the stager for this machine: page-locked memory and CUDA streams if there is CUDA."""
    return Stager(build_copier(), page_lock=build_page_lock())


@dataclass(frozen=True)
class Copying:
    """How saves copy the state."""

    stager: Stager = field(default_factory=build_stager)
    process: WriterProcess | None = None
    """The process that writes copies where one does; None if the saver needs one of its own."""
    digests: bool = False
    """Whether a copy comes with its digests, if that is possible; else who writes it takes them."""
    timeout_seconds: float = 0.0
    """How long a copy waits for an arena that may be overwritten."""


# Detect tensors that change while they are being staged.
#
# The guard holds back optimizers; it cannot hold back other code (a thread that averages weights, a loader that returns
# its live buffer). With "staging" in `checkpoint.digest_tensors` every tensor is digested before its copy begins, and
# the copy when it is complete. A save for which the two differ fails and names the tensors, instead of becoming a
# checkpoint that mixes two moments.


Compare = Callable[[StagedCopy], None]
"""Waits for the copy; raises RuntimeError if tensors changed meanwhile, and names them."""

StagingWatch = Callable[[FileData, Sequence[str]], Compare]
"""Called with a file and the names of its tensors, before they are staged."""


def watch(data: FileData, names: Sequence[str]) -> Compare:
    """Digest every tensor now, and return a function that compares the staged copies with these digests."""
    before = [elements_digest(tensor) for tensor in data.tensors]

    def compare(staged: StagedCopy) -> None:
        staged.wait()
        after = [elements_digest(tensor) for tensor in staged.tensors()]
        changed = [name for name, one, other in zip(names, before, after, strict=True) if one != other]
        if changed:
            raise RuntimeError(
                f"{listed(changed, most=5)} changed while being staged. Code that changes them must first call "
                "maybe_wait_for_staging() of the checkpoint manager"
            )

    return compare


def do_not_watch(data: FileData, names: Sequence[str]) -> Compare:
    return lambda staged: staged.wait()


def build_staging_watch(config: Checkpoint) -> StagingWatch:
    """Return `watch` if `digest_tensors` asks for it, else `do_not_watch`."""
    return watch if "staging" in config.digest_tensors else do_not_watch
