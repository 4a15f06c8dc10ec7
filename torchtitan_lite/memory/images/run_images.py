"""The images of a rank: copies of the state in memory that a later start can resume from.

Every copy that an asynchronous save makes becomes one, and with `memory_interval` also copies that no disk write
follows. Here is when such a copy is made, on all ranks alike, and in which memory; a `Marker` makes an image of it. If
too many images in a row fail on a rank, all ranks stop to stage them: they find out in the same exchange.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from torchtitan_lite import faults
from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.planning.plan_cache import PlanCache
from torchtitan_lite.checkpoint.saving.target import Origin, RankContent, SaveTarget
from torchtitan_lite.checkpoint.staging.arena import NO_STEP
from torchtitan_lite.checkpoint.staging.stager import Copying, StagedCopy, build_staging_watch
from torchtitan_lite.collection import no_collection
from torchtitan_lite.disk.block_writer import NewFile
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.writer_process import WriterProcess
from torchtitan_lite.distributed.environment import runtime_folder
from torchtitan_lite.errors import RanksDiffer
from torchtitan_lite.events import ImageMissed
from torchtitan_lite.host_memory import free_memory_bytes, host_id, oom_kills
from torchtitan_lite.log import counted, logger, readable_bytes
from torchtitan_lite.memory.images.host_replicas import HostReplicas
from torchtitan_lite.memory.images.image import Image, Marker, staged_record
from torchtitan_lite.memory.images.image_sources import FoundImages
from torchtitan_lite.memory.images.memory_budget import (
    MAX_ARENAS,
    REPLICATED_ARENAS,
    Room,
    is_short,
    num_arenas,
    reserve_bytes,
)
from torchtitan_lite.memory.images.pool import FormerImages, build_image_stager, step_in
from torchtitan_lite.memory.images.tier import TakenOver, Tier
from torchtitan_lite.memory.keeper.client import Keeper
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind
from torchtitan_lite.store.protocol import StoresCheckpoints

CLOSE_SECONDS = 30.0
"""How long the digest under way may take when the manager is closed."""
_OF_POOL = 4
"""Where the numbers of `Pool.report` begin in those of a rank: the first one says that it may have none to spare."""


class KeptImages(FoundImages):
    """Those that are found, and those of this rank in the arenas of `stager`, which this start makes for the next one.

    Each copy of a save becomes an image whether or not its file is written; so do steps that no save takes, if the
    config says so. `process` digests copies that come without digests; with `saver_has_process` it is the saver's, too,
    which starts and closes it.
    """

    keeps_copies = True

    def __init__(
        self,
        tier: Tier,
        plans: PlanCache,
        store: StoresCheckpoints,
        context: RunContext,
        *,
        saver_has_process: bool,
    ) -> None:
        super().__init__(tier, store, context)
        config = context.config
        self.stager = build_image_stager(tier.give_up)
        # Copies that an accelerator makes come without digests, so a writer process has to take them.
        needs_process = saver_has_process or (config.memory_interval > 0 and not self.stager.can_digest)
        ignored, rank = config.preemption_signals, context.peers.rank
        self.process = WriterProcess(config.timeout_seconds, ignored, rank=rank) if needs_process else None
        self._owns_process = not saver_has_process
        self._timeout_seconds = config.timeout_seconds
        self._plans, self._watch = plans, build_staging_watch(config)
        self._clock, self._interval, self._emit = context.clock, config.memory_interval, context.emit
        self._most_arenas = REPLICATED_ARENAS if config.memory_peer_copies else MAX_ARENAS
        self._replicas = HostReplicas(tier, self.stager.pool, context)
        self.marker = Marker(tier, self.stager.pool, self.process, context, self._replicas)
        """Makes images of the copies."""
        self._num_staged = 0
        """The copies that this start has begun to make: the same number on all ranks."""
        self._is_off = False
        self._former = FormerImages(tier)
        self._has_adopted = False
        self._last: Image | None = None
        self._began = 0.0

    @property
    def are_made_at_once(self) -> bool:
        """Return whether the copy of a save becomes an image before its disk write is done; else by its digests.

        It takes digests of its own then: with the copy, which takes up to a third longer, or after it.
        """
        return self._interval > 0

    def begin(self, origin: Origin) -> Origin:
        self._is_off, self.marker.num_failed = False, 0
        return super().begin(origin)

    def copying(self) -> Copying:
        return Copying(self.stager, self.process, digests=self.are_made_at_once, timeout_seconds=self._timeout_seconds)

    def start(self, run_id: str) -> None:
        self._begin_keeping()

    def sized(self, num_bytes: int) -> None:
        """Find out for how many arenas of `num_bytes` there is memory, -1 for not known. **Collective**."""
        if self._has_adopted:
            self._former.take_from(self.stager.pool, num_bytes, self._peers)
        if self._interval:
            try:
                self.marker.start_process()
            except Exception as error:
                self.marker.note_failed(0, error)  # The first image tries again.
        elif not self._former.are_any:
            return
        found = self._found(num_bytes)
        if self._former.are_any and num_arenas(found) < (2 if self._interval else 1):
            self._former.free()
            # Again: it may have counted in the limits of another job.
            found = self._found(num_bytes)
        if not self._interval:
            return
        if self._replicas.begin(found):
            self._have_slots(REPLICATED_ARENAS)
            self._replicas.resend(self._former.step)
        else:
            self._make(found)

    def numbers(self) -> tuple[int, ...]:
        """Return what this rank reports to the others with its plan, as numbers of which the maximum counts."""
        if not self._interval:
            return ()
        of_pool = self.stager.pool.report()
        if of_pool:
            of_pool = of_pool[0] or self.stager.is_preparing, *of_pool[1:]
        # Looked at again for each image, because the first steps of a start do not show the last peak.
        is_short_here = not self._is_off and is_short()
        # These numbers travel in the all-reduce of the plan, so an image costs no exchange of its own.
        is_off = self.marker.has_failed or self.tier.is_off
        return is_off, is_short_here, *self._replicas.numbers(), *of_pool

    def agreed(self, step: int, maxima: Sequence[int]) -> None:
        """Note that a save of `step` is about to stage it. **Collective**, main thread.

        If a rank has no arena to spare, waits until the images under way are complete, and finds out again which one
        all ranks have: what is then free may be the only image that is complete. A rank with one arena waits, too: a
        digest of the copy in it may be under way.
        """
        if any(maxima[_OF_POOL : _OF_POOL + 1]):
            self.stager.pool.wait_until_unread(self._timeout_seconds)
            maxima = self._peers.max_over_ranks(*self.numbers())
        self._agree(maxima)
        if len(self.stager.pool.slots) == 1:
            self.stager.pool.wait_until_unread(self._timeout_seconds)
        self._note_staged(step)
        self._began = self._clock()

    def copied(self, target: SaveTarget, staged: StagedCopy, content: RankContent) -> RankContent:
        """Return `content`, whose copy also becomes an image: before its write, or by it."""
        plan, objects = content.plan, content.objects
        image = Image(target.step, target.origin, plan, objects, staged, self._began, copy=self._num_staged)

        def wait() -> None:
            content.wait()
            image.stall_seconds = self._clock() - image.began_seconds
            if self.are_made_at_once:
                # A second reader: the arena must not be overwritten before both the disk write and the image are done.
                self.stager.pool.add_reader(staged.slot)
                self.marker.mark_later(image)

        def write(new: NewFile) -> FileRecord:
            # This copy has its digests, so the save does not hash it again. Without `memory_interval` there is time for
            # a digest during the disk write, which no step waits for, and the copy stays as short as it can be.
            if self.are_made_at_once:
                return content.write(new)
            try:
                record = content.write(new)
            except Exception:
                # The disk failed, not the copy: it is all that a kill leaves then.
                self.marker.mark(image, staged_record(staged))
                raise
            self.marker.mark(image, record)
            return record

        return dataclasses.replace(content, wait=wait, write=write)

    def durable(self, committed: CheckpointInfo | None) -> None:
        if committed is not None and committed.kind is CheckpointKind.FULL:
            self.tier.note_committed(committed)
            self.marker.renew_cards()
        self._former.free()

    def not_saved(self, step: int, make_state: Callable[[], State], make_origin: Callable[[], Origin]) -> bool:
        """Copy the state of `step` into memory if that is due, unless a rank has no arena to spare. **Collective**."""
        if not self._interval or step % self._interval or self._is_off:
            return False
        self._stage(step, make_state, make_origin())
        return True

    def rolled_back(self, step: int) -> None:
        """Drop the images of later steps, while none is being made. Main thread; all ranks, with the same step."""
        self.stager.pool.drop_after(step)
        if self._former.step > step:
            self._former.free_later()

    def wait_for_staging(self) -> None:
        image, self._last = self._last, None
        if image is not None:
            began = self._clock()
            image.staged.wait()
            image.stall_seconds += self._clock() - began

    def settle(self) -> None:
        self.wait_for_staging()
        self.marker.wait(self._timeout_seconds)
        self._replicas.pause()  # A load may take over the memory that it receives into.

    def finished(self, run_id: str) -> None:
        super().finished(run_id)
        self._former.close()

    def close(self) -> None:
        self.marker.close(CLOSE_SECONDS)
        self._replicas.close()
        self._former.close()
        if self._owns_process and self.process is not None:
            self.process.close()

    def _begin_keeping(self) -> None:
        self.tier.begin_keeping(self.marker.helpers)

    def use(self, taken: TakenOver) -> None:
        """Make images in the arenas in `taken`. On return the keeper holds them under names of this start."""
        pairs, num_loaded = taken.arenas, taken.num_loaded
        self.marker.wait(CLOSE_SECONDS)
        self._former.close()  # A load has descriptors of its own of what it needs.
        steps = [step_in(mark_fd) for _, mark_fd in pairs]
        parts, self._former.step = self._peers.max_over_ranks(num_loaded, steps[0] if num_loaded else NO_STEP)
        # Several files in place of one: none of them has the room for what is to be copied now.
        is_apart = parts > 1
        # A job that the kernel killed for memory cannot say so, but the count of its cgroup can: one copy fewer for
        # each kill.
        wanted = max(1, self._most_arenas - oom_kills()) if self._interval else 1
        most = num_loaded if is_apart else max(wanted, num_loaded)
        for fd in [fd for pair in pairs[most:] for fd in pair]:
            os.close(fd)
        arenas = self._peers.together(lambda: self.stager.adopt(pairs[:most]))
        for arena in arenas:
            self.tier.keep(arena)
        self._has_adopted = True
        if is_apart:
            return self._former.hold(arenas)
        of_ranks = self._peers.gather(steps[:most])
        if self._interval:
            self.stager.pool.resize(max(map(len, of_ranks)))
        adopted = [*zip(arenas, steps, strict=False)]
        self.stager.pool.adopt(adopted, [step for of_rank in of_ranks for step in of_rank])

    def _make(self, found: list[Room]) -> None:
        """Have as many slots as there is memory for, or none of these images; one line says that they are fewer."""
        number = num_arenas(found)
        # With two, no image is made while a save is being written, so a failure then loses the steps of one save. With
        # one there are only the copies that saves make anyway, which become images, too.
        self._have_slots(number if number > 1 else 1)
        self._is_off = number < 2
        if number == MAX_ARENAS or not self._peers.is_coordinator:
            return
        every, size = counted(self._interval, "step"), readable_bytes(max(each.arena_bytes for each in found))
        kills = max(each.oom_kills for each in found)
        why = f" (the kernel has killed {counted(kills, 'process')} of its cgroup for memory)" if kills else ""
        if number > 1:
            copies = "two copies of the state, not three, of"
            logger.info("In-memory snapshots every %s: %s %s each%s", every, copies, size, why)
        elif any(each.arena_bytes < 0 for each in found):
            logger.warning("No in-memory snapshots every %s: the state cannot be saved. The first save says why", every)
        else:
            reason = (
                f"two copies of the state ({size} on each rank) do not fit into the memory of each host next to "
                f"training{why}. Unset checkpoint.memory_interval, or give the job more memory"
            )
            logger.warning("No in-memory snapshots every %s: %s", every, reason)

    def _have_slots(self, number: int) -> None:
        self.stager.pool.resize(number)
        self.stager.shrink(number, self._timeout_seconds)

    def _found(self, num_bytes: int) -> list[Room]:
        """Return what `num_arenas` needs to know of all ranks. **Collective**."""
        have = sum(slot.arena.num_bytes for slot in self.stager.pool.slots if slot.arena is not None)
        return self._peers.gather(
            Room(host_id(), num_bytes, have, free_memory_bytes(), reserve_bytes(), self.tier.replica_bytes, oom_kills())
        )

    def _agree(self, highest: Sequence[int]) -> bool:
        """Note the maximum over all ranks of their reports; return whether an image can be staged on all of them."""
        if not highest:
            return True
        is_off, lacks_memory, lacks_replica, has_no_replica, *of_pool = highest
        self._replicas.agree(lacks_replica, has_no_replica)
        has_spare = self.stager.pool.agree(of_pool)
        if is_off and not self._is_off:
            self._end("a rank cannot make or keep them")
        if lacks_memory and not self._is_off:
            self._end("training needs their memory. Unset checkpoint.memory_interval, or give the job more")
            self._have_slots(1)
        if self.stager.pool.complete > self._former.step:
            self._former.free_later()
        return has_spare and not self._is_off

    def _end(self, reason: str) -> None:
        """Make no more of these images, as all ranks have agreed."""
        self._is_off = True
        if self._peers.is_coordinator:
            logger.warning("No more in-memory snapshots in this start: %s", reason.removesuffix("."))

    def _stage(self, step: int, make_state: Callable[[], State], origin: Origin) -> None:
        if len(self.stager.pool.slots) < 2:
            return self._note_missed(step, "its memory is being made")
        began = self._clock()
        state: State = {}
        failure: Exception | None = None
        try:
            faults.point("image", step=step)
            state = make_state()
            self.marker.start_process()  # Again, if it died.
        except Exception as error:
            failure = error
        with no_collection():
            try:
                planned = self._plans.plan(state, compares=True, failure=failure, numbers=self.numbers(), step=step)
                if planned.differs is not None:
                    return self._end(f"{planned.differs}")
                if not self._agree(planned.agreed):
                    # Skipped: a wait for an arena would stop training on all ranks.
                    reason = "its memory is being made" if self.stager.is_preparing else "earlier ones are being read"
                    return self._note_missed(step, "no more are made" if self._is_off else reason)
                self._note_staged(step)
                file = planned.file()
                check = self._watch(file.data, [part.key for part in file.plan.parts])
                staged = self.stager.take(file.data, step, digests=True)
            except RanksDiffer as error:
                return self._end(f"{error}")
            except Exception as error:
                self.marker.note_failed(step, error)
                return
        self._last = Image(step, origin, file.plan, file.objects, staged, began, self._num_staged, check)
        self._last.stall_seconds = self._clock() - began
        self.marker.mark_later(self._last)

    def _note_missed(self, step: int, reason: str) -> None:
        logger.debug("Step %d gets no image: %s", step, reason)
        self._emit(ImageMissed(step, reason=reason))

    def _note_staged(self, step: int) -> None:
        """Note that all ranks are about to stage `step`."""
        self._num_staged += 1
        self.stager.pool.note_staged(step)
        self._replicas.note_staged(step, self._num_staged)


def build_run_images(
    store: StoresCheckpoints,
    root: Path,
    plans: PlanCache,
    context: RunContext,
) -> FoundImages:
    """Return the images of a run that keeps some if it makes copies. Touches nothing."""
    config = context.config
    keeper = Keeper(root.absolute(), config.memory_ttl_seconds, runtime=runtime_folder())
    tier = Tier(keeper, context.peers.rank)
    if config.async_mode == "disabled":
        return FoundImages(tier, store, context)
    has_process = config.async_mode == "async_with_pinned_mem"
    return KeptImages(tier, plans, store, context, saver_has_process=has_process)
