"""The images that a start resumed from, where their memory cannot take its own: the files have other sizes now.

They stay next to the memory for new images, because until one of those is complete, or a save is durable, they are all
that a second kill leaves of the run.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torchtitan_lite.checkpoint.devices.page_lock import wait_for_unlocking
from torchtitan_lite.checkpoint.images.pool import Pool
from torchtitan_lite.checkpoint.images.tier import Tier
from torchtitan_lite.checkpoint.staging.arena import StagingArena
from torchtitan_lite.checkpoint.staging.mark import UnusableMark, read_mark
from torchtitan_lite.checkpoint.staging.slots import NO_STEP
from torchtitan_lite.distributed.peers import Peers


class FormerImages:
    """Arenas of this rank, which `tier` keeps and no copy is made into. Any thread."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._arenas: list[StagingArena] = []
        self._lock = threading.Lock()
        self.step = NO_STEP
        """The step that was loaded from memory; `NO_STEP` for none. The same on all ranks."""
        self.are_any = False
        """Whether a rank has one; the same on all ranks, and true also after they have been freed."""

    def hold(self, arenas: Sequence[StagingArena]) -> None:
        """Own `arenas`."""
        self.are_any = True
        with self._lock:
            self._arenas += arenas

    def take_from(self, pool: Pool, num_bytes: int, peers: Peers) -> None:
        """Take the arenas with what was loaded out of `pool`, if they have no room for `num_bytes` on some rank.

        Leaves empty slots. **Collective**, main thread.
        """
        loaded = [slot for slot in pool.slots if slot.is_valid and slot.step == self.step]
        arenas = [slot.arena for slot in loaded if slot.arena is not None]
        if peers.max_over_ranks(any(arena.num_bytes < num_bytes for arena in arenas))[0]:
            for slot in loaded:
                slot.is_valid, slot.step, slot.arena = False, NO_STEP, None
            self.hold(arenas)

    def free(self) -> None:
        """Free all of them: they are no images any more. Idempotent; takes 0.2 s for each GB."""
        with self._lock:
            for arena in self._arenas:
                self._tier.give_up(arena)
                arena.close()
            self._arenas = []
        wait_for_unlocking()

    def free_later(self) -> None:
        """Free all of them in a thread. Idempotent."""
        if self._arenas:
            threading.Thread(target=self.free, name="former images", daemon=True).start()

    def close(self) -> None:
        """Close them, and leave those to later starts that the keeper holds. Idempotent."""
        with self._lock:
            for arena in self._arenas:
                arena.close()
            self._arenas = []

    def forget_keeper(self) -> None:
        """Free them: the keeper holds nothing any more."""
        with self._lock:
            for arena in self._arenas:
                arena.is_kept = False
        self.close()


def step_in(mark_fd: int) -> int:
    """Return the step of the valid image that the mark describes; `NO_STEP` for none."""
    try:
        found = read_mark(mark_fd)
    except (UnusableMark, OSError):
        return NO_STEP
    return NO_STEP if found is None else found.step
