"""The images of a run on this rank: from the ids that all ranks agree on to the end of the keeper.

A start that makes no copies takes the images of the start before, if there are any, and lets them go after its load.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable

from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.images.commits import commits_in
from torchtitan_lite.checkpoint.images.image_sources import ImageSources
from torchtitan_lite.checkpoint.images.image_stager import build_image_stager
from torchtitan_lite.checkpoint.images.images import Images
from torchtitan_lite.checkpoint.images.listener import ImageListener
from torchtitan_lite.checkpoint.images.no_replicas import NoReplicas
from torchtitan_lite.checkpoint.images.pool import Pool
from torchtitan_lite.checkpoint.images.tier import TakenOver, Tier, build_tier
from torchtitan_lite.checkpoint.no_images import NoImages
from torchtitan_lite.checkpoint.planning.plan_cache import PlanCache
from torchtitan_lite.checkpoint.resume.source import LoadSource
from torchtitan_lite.checkpoint.saving.content import Copying
from torchtitan_lite.checkpoint.saving.writer import Origin
from torchtitan_lite.disk.writer_process import WriterProcess
from torchtitan_lite.distributed.environment import runtime_folder
from torchtitan_lite.log import logger
from torchtitan_lite.store.store import CheckpointStore

MakesReplicas = Callable[[Tier, Pool, RunContext], NoReplicas]


class FoundImages(NoImages):
    """The images that the start before left in `tier`, for a start that makes none."""

    def __init__(self, tier: Tier, store: CheckpointStore, context: RunContext) -> None:
        super().__init__()
        self.tier = tier
        self.sources: ImageSources = ImageSources(tier, context)
        self._store = store
        self._peers = context.peers

    def begin(self, origin: Origin) -> Origin:
        start, folder_id, lineage = self._peers.on_coordinator(lambda: (*self._ids(), origin.lineage))
        self.tier.begin(start, folder_id)
        if not folder_id:
            self.tier.is_off = True
        if not folder_id or not self.keeps_copies:
            return origin
        return dataclasses.replace(origin, start=start, lineage=lineage)

    def take_over(self, source: LoadSource | None) -> None:
        """Take the memory over that the start before left, after a load of `source`. **Collective**.

        No image that may be needed is dropped before the keeper holds it under a name of this start.
        """
        taken = self.sources.taken_over(source)
        if self._peers.is_coordinator:
            self.tier.note_commits(commits_in(self._store))
        self.begin_keeping()
        if taken is None:
            return
        self.tier.replica_bytes = taken.replica_bytes
        self._use(taken)
        self._peers.gather(None)  # All ranks have adopted theirs.
        self.tier.drop_names(taken.names)

    def finish(self) -> None:
        self.tier.finish()

    def leave(self) -> None:
        self.tier.leave()

    def _use(self, taken: TakenOver) -> None:
        for fd in [fd for pair in taken.arenas for fd in pair]:
            os.close(fd)

    def _ids(self) -> tuple[str, str]:
        try:
            return uuid.uuid4().hex[:16], self._store.folder_id(make=True)
        except OSError as error:
            logger.warning("No images in memory: the folder %s got no id: %s", self._store.root, error)
            return uuid.uuid4().hex[:16], ""


class KeptImages(FoundImages):
    """Those, and the `images` that this start makes of its copies, for the next one."""

    keeps_copies = True

    def __init__(self, images: Images, store: CheckpointStore, context: RunContext) -> None:
        super().__init__(images.tier, store, context)
        self.images = images
        self.listener = ImageListener(images)
        self.copying = Copying(
            images.stager, self.listener, digests=images.are_made_at_once, timeout_seconds=images.timeout_seconds
        )
        self.process = images.process

    def begin_keeping(self) -> None:
        self.tier.begin_keeping(self.images.marker.helpers)

    def drop_after(self, step: int) -> None:
        self.images.drop_after(step)

    def wait_for_staging(self) -> None:
        self.images.wait_for_staging()

    def settle(self) -> None:
        self.images.wait_for_staging()
        self.images.wait(self.images.timeout_seconds)

    def finish(self) -> None:
        super().finish()
        self.images.forget_keeper()

    def close(self) -> None:
        self.images.close()

    def _use(self, taken: TakenOver) -> None:
        self.images.adopt(taken.arenas, taken.num_loaded)


def build_run_images(
    store: CheckpointStore,
    plans: PlanCache,
    context: RunContext,
    make_replicas: MakesReplicas = lambda *_: NoReplicas(),
) -> FoundImages:
    """Return the images of a run that keeps some if it makes copies. Touches nothing."""
    config, rank = context.config, context.peers.rank
    tier = build_tier(store.root, config.memory_ttl_seconds, runtime_folder(), rank)
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
