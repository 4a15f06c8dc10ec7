"""The arenas of a rank that keeps images, and which of them the next copy goes to.

With one arena each image replaces the last one, which must be written by then. With more, an arena is not overwritten
while a disk write or a digest reads it, nor while it has the latest image that all ranks are known to have complete, or
the latest one whose replicas are. So, whenever the job is killed, there is one step whose image every rank has. Which
step that is, and whether a rank has no arena to spare, the ranks find out in the exchange that each image needs anyway:
`report` goes in, `agree` takes what comes out. The rule itself is in pure functions.

`FormerImages` are those that a start resumed from, where their memory cannot take its own: the files have other sizes
now. They stay next to the memory for new images, because until one of those is complete, or a save is durable, they are
all that a second kill leaves of the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from torchtitan_lite.checkpoint.devices.page_lock import PageLock, build_page_lock, wait_for_unlocking
from torchtitan_lite.checkpoint.staging.arena import NO_STEP, ArenaSlot, Slots, StagingArena
from torchtitan_lite.checkpoint.staging.copiers import Copier, build_copier
from torchtitan_lite.checkpoint.staging.mark import Mark, UnusableMark, read_mark
from torchtitan_lite.checkpoint.staging.stager import Stager
from torchtitan_lite.disk.threads import in_a_thread
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.memory.images.tier import Tier

NUM_RECENT = 4
"""Steps in a report: of more than there are arenas no rank has an image."""


def choose_arena(arenas: Sequence[ArenaSlot], kept: Collection[int]) -> int | None:
    """Return the number of the arena to overwrite, None for none, if the images of the steps in `kept` have to stay."""
    if len(arenas) == 1:
        return 0
    # Only what the last exchange found complete is protected, so all ranks protect the same image, however fast each of
    # them digests.
    spare = [
        number
        for number, arena in enumerate(arenas)
        if not arena.is_read and not (arena.is_valid and arena.step in kept)
    ]
    return min(spare, key=lambda number: (arenas[number].is_valid, arenas[number].step), default=None)


def is_busy(arenas: Sequence[ArenaSlot], num_kept: int = 1) -> bool:
    """Return whether `choose_arena` could return None, whichever `num_kept` images the ranks find to be complete."""
    spare = [arena for arena in arenas if not arena.is_read]
    return not spare or (len(arenas) > 1 and len(spare) <= num_kept and all(arena.is_valid for arena in spare))


class Pool(Slots):
    """The slots of this rank, one at first. Any thread, if not said otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.complete = NO_STEP
        """The latest step whose image every rank has, as far as the ranks have found out."""
        self.num_kept = 1
        """How many images may have to stay: two with replicas."""
        self.replicated = NO_STEP
        """The latest step whose replicas are complete everywhere, likewise; `NO_STEP` where none are made."""
        self._recent: list[int] = []
        self._still_read: dict[tuple[int, int], ArenaSlot] = {}
        """The slots that were read at the last `clear`, by the memory that they had."""

    def resize(self, num_slots: int) -> None:
        """Have at least `num_slots`. Main thread; all ranks, with the same number."""
        with self._changed:
            self.slots += [ArenaSlot() for _ in range(num_slots - len(self.slots))]

    def shrink(self, num_slots: int, seconds: float) -> list[tuple[StagingArena, bool]]:
        """Have at most `num_slots`; return the arenas of the others, and whether each is still read after `seconds`.

        What stays is read, or has the image that all ranks have. Main thread; all ranks, with the same number.
        """
        with self._changed:
            if len(self.slots) <= num_slots:
                return []

            def usefulness(slot: ArenaSlot) -> tuple[bool, bool]:
                return slot.is_read, slot.is_valid and slot.step == self.complete

            first = sorted(self.slots, key=usefulness, reverse=True)
            self.slots, others = first[:num_slots], first[num_slots:]
            self._changed.wait_for(lambda: not any(slot.is_read for slot in others), seconds)
            for slot in others:
                slot.is_valid, slot.num_copies = False, slot.num_copies + 1
            return [(slot.arena, slot.is_read) for slot in others if slot.arena is not None]

    def report(self) -> tuple[int, ...]:
        """Return what this rank reports to the others, as numbers of which the highest over all ranks counts.

        Nothing with one arena. Else whether there may be none to spare, and of each of the last steps whether its image
        is not complete here.
        """
        if len(self.slots) == 1:
            return ()
        with self._changed:
            here = {slot.step for slot in self.slots if slot.is_valid}
            return (is_busy(self.slots, self.num_kept), *(step not in here for step in self._last_steps()))

    def agree(self, highest: Sequence[int]) -> bool:
        """Note the maximum over all ranks of what they reported; return whether each has an arena to spare."""
        if not highest:
            return True
        busy, *lacking = highest
        with self._changed:
            found = [step for step, lacks in zip(self._last_steps(), lacking, strict=True) if not lacks]
            self.complete = found[-1] if found else self.complete
        return not busy

    def note_staged(self, step: int) -> None:
        """Note that the ranks are about to stage `step`, each that can. Main thread; all ranks."""
        with self._changed:
            self._recent = [*(each for each in self._recent if each != step), step][-NUM_RECENT:]

    def validate(self, slot: ArenaSlot, number: int, mark: Callable[[], None]) -> bool:
        """Call `mark`, after which the image in `slot` is valid; but not if copy `number` was overwritten since.

        Returns whether it is valid. Else a mark could be set next to the bytes of a later step.
        """
        with self._changed:
            if slot.num_copies != number:
                return False
            mark()
            slot.is_valid = True
            self._changed.notify_all()
            return True

    def for_each_valid(self, act: Callable[[StagingArena], None]) -> None:
        """Call `act` with each arena whose image is complete here; none is overwritten meanwhile. Any thread."""
        with self._changed:
            for slot in self.slots:
                if slot.is_valid and slot.arena is not None:
                    act(slot.arena)

    def drop_after(self, step: int) -> None:
        """Have no image of a later step than `step`. Main thread; all ranks, with the same step."""
        with self._changed:
            for slot in self.slots:
                if slot.step > step:
                    slot.step, slot.is_valid, slot.num_copies = NO_STEP, False, slot.num_copies + 1
                    if slot.arena is not None and slot.arena.mark is not None:
                        slot.arena.mark.clear()
            self._recent = [each for each in self._recent if each <= step]
            self.complete, self.replicated = (
                NO_STEP if each > step else each for each in (self.complete, self.replicated)
            )

    def clear(self) -> list[tuple[StagingArena, bool]]:
        with self._changed:
            self._still_read = {slot.arena.identity: slot for slot in self.slots if slot.arena and slot.is_read}
            self.complete = self.replicated = NO_STEP
            return super().clear()

    def adopt(self, arenas: Sequence[tuple[StagingArena, int]], steps: Sequence[int]) -> None:
        """Use `arenas`, each with the step of its valid image or `NO_STEP`, after `clear`.

        `steps`: of all ranks, all of them. Memory that was still read before `clear` is still read. Main thread; all
        ranks.
        """
        self.resize(len(arenas))
        with self._changed:
            for number, (arena, step) in enumerate(arenas):
                slot = self.slots[number] = self._still_read.pop(arena.identity, self.slots[number])
                slot.arena, slot.step, slot.is_valid = arena, step, step != NO_STEP
            self._still_read = {}
            self._recent = sorted({step for step in steps if step != NO_STEP})[-NUM_RECENT:]

    def _free_slot(self) -> ArenaSlot | None:
        number = choose_arena(self.slots, (self.complete, self.replicated))
        return None if number is None else self.slots[number]

    def _last_steps(self) -> list[int]:
        """Return the last steps that were staged, `NO_STEP` where there are fewer."""
        return [NO_STEP] * (NUM_RECENT - len(self._recent)) + self._recent


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
            in_a_thread("former images", self.free)

    def close(self) -> None:
        """Close them, and leave those to later starts that the keeper holds. Idempotent."""
        with self._lock:
            for arena in self._arenas:
                arena.close()
            self._arenas = []


def step_in(mark_fd: int) -> int:
    """Return the step of the valid image that the mark describes; `NO_STEP` for none."""
    try:
        found = read_mark(mark_fd)
    except (UnusableMark, OSError):
        return NO_STEP
    return NO_STEP if found is None else found.step


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
