"""Copies of the state in arenas that outlive this process: each has a mark, and a keeper may hold it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchtitan_lite.checkpoint.devices.page_lock import PageLock, build_page_lock
from torchtitan_lite.checkpoint.staging.arena import StagingArena
from torchtitan_lite.checkpoint.staging.copiers import Copier, build_copier
from torchtitan_lite.checkpoint.staging.mark import Mark
from torchtitan_lite.checkpoint.staging.stager import Stager
from torchtitan_lite.memory.images.pool import Pool


class ImageStager(Stager):
    """Copies into the arenas of a `Pool`. `let_go` has the keeper drop an arena that is replaced or not needed."""

    pool: Pool

    def __init__(
        self, copier: Copier, *, let_go: Callable[[StagingArena], None], page_lock: PageLock | None = None
    ) -> None:
        super().__init__(copier, page_lock=page_lock, pool=Pool())
        self._let_go = let_go

    def adopt(self, descriptors: Sequence[tuple[int, int]]) -> list[StagingArena]:
        """Return the arenas in `descriptors` (memory, mark), which they own; `pool.adopt` puts them to use.

        Closes those of now: the descriptors may be of the same memory, and two arenas of it would overwrite each other.
        """
        self.finish_preparation()
        for arena, _ in self.pool.clear():
            # A save that the caller stopped waiting for may still be written from it.
            arena.close(is_unused=False)
        # Their pages are locked before the first copy, by `prepare`: a load needs no locked ones.
        return [StagingArena.adopted(fd, mark_fd, page_lock=self._page_lock) for fd, mark_fd in descriptors]

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
    """Return the stager for this machine: page-locked memory and CUDA streams if there is CUDA."""
    return ImageStager(build_copier(), let_go=let_go, page_lock=build_page_lock())
