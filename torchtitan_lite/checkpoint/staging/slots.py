"""Where the arenas of a rank are: one slot, whose copy each save replaces.

A slot counts who still reads the copy in it. A run that keeps its copies for later starts has several slots, and a rule
for which of them a copy may replace: `images/pool.py`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torchtitan_lite.checkpoint.staging.arena import StagingArena

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
