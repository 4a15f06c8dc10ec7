"""The images of a run on this rank: from the ids that all ranks agree on to the end of the keeper.

A start that makes no copies takes the images of the start before, if there are any, and lets them go after its load.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.planning.plan_cache import PlanCache
from torchtitan_lite.checkpoint.reading.source import LoadSource, Sources
from torchtitan_lite.checkpoint.saving.companion import Companion, CopyOfSave
from torchtitan_lite.checkpoint.saving.target import Origin, RankContent
from torchtitan_lite.checkpoint.staging.stager import Copying
from torchtitan_lite.disk.block_writer import NewFile
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.writer_process import WriterProcess
from torchtitan_lite.distributed.environment import runtime_folder
from torchtitan_lite.log import logger
from torchtitan_lite.memory.images.card import commits_in
from torchtitan_lite.memory.images.image import Image
from torchtitan_lite.memory.images.image_sources import ImageSources
from torchtitan_lite.memory.images.image_stager import build_image_stager
from torchtitan_lite.memory.images.images import Images
from torchtitan_lite.memory.images.pool import Pool
from torchtitan_lite.memory.images.replicates import Replicates
from torchtitan_lite.memory.images.tier import TakenOver, Tier, build_tier
from torchtitan_lite.store.manifest import CheckpointInfo
from torchtitan_lite.store.protocol import StoresCheckpoints

MakesReplicas = Callable[[Tier, Pool, RunContext], Replicates]


class FoundImages(Companion):
    """The images that the start before left in `tier`, for a start that makes none."""

    keeps_copies = False
    """Whether copies of this start stay in memory for the next one."""

    def __init__(self, tier: Tier, store: StoresCheckpoints, context: RunContext) -> None:
        self.tier = tier
        self._sources = ImageSources(tier, context)
        self._store = store
        self._peers = context.peers

    def sources(self, others: Sources) -> Sources:
        """Return the images that are found: the first companion's, so there are no others yet."""
        return self._sources

    def begin(self, origin: Origin) -> Origin:
        start, folder_id, lineage = self._peers.on_coordinator(lambda: (*self._ids(), origin.lineage))
        self.tier.begin(start, folder_id)
        if not folder_id:
            self.tier.is_off = True
        if not folder_id or not self.keeps_copies:
            return origin
        return dataclasses.replace(origin, start=start, lineage=lineage)

    def loaded(self, source: LoadSource | None) -> None:
        """Take the memory over that the start before left, after a load of `source`. **Collective**.

        No image that may be needed is dropped before the keeper holds it under a name of this start.
        """
        taken = self._sources.taken_over(source)
        if self._peers.is_coordinator:
            self.tier.note_commits(commits_in(self._store))
        self._begin_keeping()
        if taken is None:
            return
        self.tier.replica_bytes = taken.replica_bytes
        self._use(taken)
        self._peers.gather(None)  # All ranks have adopted theirs.
        self.tier.drop_names(taken.names)

    def finished(self, run_id: str) -> None:
        self.tier.finish()

    def leave(self, seconds_left: Callable[[], float]) -> None:
        """Let the images outlive this process."""
        self.tier.leave()

    def _begin_keeping(self) -> None:
        """Start what keeps images: nothing, because this start makes none."""

    def _use(self, taken: TakenOver) -> None:
        for fd in [fd for pair in taken.arenas for fd in pair]:
            os.close(fd)

    def _ids(self) -> tuple[str, str]:
        try:
            return uuid.uuid4().hex[:16], self._store.folder_id(make=True)
        except OSError as error:
            logger.warning("No images in memory: the folder %s got no id: %s", self._store.address, error)
            return uuid.uuid4().hex[:16], ""


class KeptImages(FoundImages):
    """Those, and the `images` that this start makes of its copies and between saves, for the next one.

    Each copy of a save becomes an image whether or not its file is written.
    """

    keeps_copies = True

    def __init__(self, images: Images, store: StoresCheckpoints, context: RunContext) -> None:
        super().__init__(images.tier, store, context)
        self.images = images
        self._began = 0.0

    def copying(self) -> Copying:
        images = self.images
        return Copying(
            images.stager, images.process, digests=images.are_made_at_once, timeout_seconds=images.timeout_seconds
        )

    def rolled_back(self, step: int) -> None:
        self.images.drop_after(step)

    def start(self, run_id: str) -> None:
        self._begin_keeping()

    def sized(self, num_bytes: int) -> None:
        self.images.make_room(num_bytes)

    def numbers(self) -> tuple[int, ...]:
        return self.images.report()

    def agreed(self, step: int, maxima: Sequence[int]) -> None:
        self.images.note_save(step, maxima)
        self._began = self.images.now()

    def copied(self, copy: CopyOfSave, content: RankContent) -> RankContent:
        """Return `content`, whose copy also becomes an image: before its write, or by it."""
        images, target = self.images, copy.target
        image = Image(
            target.step, target.origin, copy.plan, copy.objects, copy.staged, self._began, copy=images.num_staged
        )

        def wait() -> None:
            content.wait()
            images.note_staged(image)
            if images.are_made_at_once:
                # A second reader: the arena must not be overwritten before both the disk write and the image are done.
                images.stager.pool.add_reader(copy.staged.slot)
                images.marker.mark_later(image)

        def write(new: NewFile) -> FileRecord:
            # This copy has its digests, so the save does not hash it again. Without `memory_interval` there is time for
            # a digest during the disk write, which no step waits for, and the copy stays as short as it can be.
            if images.are_made_at_once:
                return content.write(new)
            try:
                record = content.write(new)
            except Exception:
                # The disk failed, not the copy: it is all that a kill leaves then.
                images.marker.digest_here(image)
                raise
            images.marker.mark(image, record)
            return record

        return dataclasses.replace(content, wait=wait, write=write)

    def durable(self, committed: CheckpointInfo | None) -> None:
        self.images.note_durable(committed)

    def not_saved(self, step: int, make_state: Callable[[], State], make_origin: Callable[[], Origin]) -> bool:
        if not self.images.is_due(step):
            return False
        self.images.stage(step, make_state, make_origin())
        return True

    def wait_for_staging(self) -> None:
        self.images.wait_for_staging()

    def settle(self) -> None:
        self.images.wait_for_staging()
        self.images.wait(self.images.timeout_seconds)

    def finished(self, run_id: str) -> None:
        super().finished(run_id)
        self.images.forget_keeper()

    def close(self) -> None:
        self.images.close()

    def _begin_keeping(self) -> None:
        self.tier.begin_keeping(self.images.marker.helpers)

    def _use(self, taken: TakenOver) -> None:
        self.images.adopt(taken.arenas, taken.num_loaded)


def build_run_images(
    store: StoresCheckpoints,
    root: Path,
    plans: PlanCache,
    context: RunContext,
    make_replicas: MakesReplicas,
) -> FoundImages:
    """Return the images of a run that keeps some if it makes copies. Touches nothing."""
    config, rank = context.config, context.peers.rank
    tier = build_tier(root, config.memory_ttl_seconds, runtime_folder(), rank)
    if config.async_mode == "disabled":
        return FoundImages(tier, store, context)
    stager = build_image_stager(tier.give_up)
    # Copies that an accelerator makes come without digests, so the writer process has to take them.
    digests_elsewhere = config.memory_interval > 0 and not stager.can_digest
    needs_process = digests_elsewhere or config.async_mode == "async_with_pinned_mem"
    process = WriterProcess(config.timeout_seconds, config.preemption_signals, rank=rank) if needs_process else None
    replicas = make_replicas(tier, stager.pool, context)
    images = Images(tier, stager, process, plans, context, replicas, owns_process=config.async_mode == "async")
    return KeptImages(images, store, context)
