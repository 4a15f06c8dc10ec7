"""Copies of the state in arenas that outlive this process: each has a mark, and a keeper may hold it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchtitan_lite.checkpoint.images.pool import Pool
from torchtitan_lite.checkpoint.staging.arena import StagingArena
from torchtitan_lite.checkpoint.staging.copiers import Copier, build_copier
from torchtitan_lite.checkpoint.staging.mark import Mark
from torchtitan_lite.checkpoint.staging.stager import Stager


class ImageStager(Stager):
    """Copies into the arenas of a `Pool`. `let_go` has the keeper drop an arena that is replaced or not needed."""

    pool: Pool

    def __init__(self, copier: Copier, *, pin: bool, let_go: Callable[[StagingArena], None]) -> None:
        super().__init__(copier, pin=pin, pool=Pool())
        self._let_go = let_go

    def adopt(self, descriptors: Sequence[tuple[int, int]]) -> list[StagingArena]:
        """Return the arenas in `descriptors` (memory, mark), which they own; `pool.adopt` puts them to use.

        Closes those of now: the descriptors may be of the same memory, and two arenas of it would overwrite each other.
        """
        self.finish_preparation()
        for arena, _ in self.pool.clear():
            # A save that the caller stopped waiting for may still be written from it.
            arena.close(is_unused=False)

        def adopt() -> list[StagingArena]:
            return [StagingArena.adopted(fd, mark_fd, pin=self._pin) for fd, mark_fd in descriptors]

        return self._in_a_thread(adopt).result()

    def shrink(self, num_slots: int, seconds: float) -> None:
        """Have at most `num_slots`, and free the others' arenas once they are not read, after `seconds` at most."""
        if len(self.pool.slots) > num_slots:
            self.finish_preparation()
        for arena, is_read in self.pool.shrink(num_slots, seconds):
            self._let_go(arena)
            arena.close(is_unused=not is_read)

    def _new_mark(self) -> Mark | None:
        try:
            return Mark()
        except (AttributeError, OSError):
            # The system has no memfds: then the arena is a temporary file, and no image.
            return None

    def _give_up(self, arena: StagingArena) -> None:
        self._let_go(arena)
        super()._give_up(arena)


def build_image_stager(let_go: Callable[[StagingArena], None]) -> ImageStager:
    """Return the stager for this machine: pinned memory and CUDA streams if there is CUDA."""
    return ImageStager(build_copier(), pin=torch.cuda.is_available(), let_go=let_go)
