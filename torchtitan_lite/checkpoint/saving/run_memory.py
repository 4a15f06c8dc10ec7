"""The memory tier of a run on this rank: from the ids that all ranks agree on to the end of the keeper.

A run without the tier has none of it: no keeper, no marks, no id in its folder. The manager calls the same methods.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable

from torchtitan_lite.checkpoint.memory.commits import commits_in
from torchtitan_lite.checkpoint.memory.tier import TakenOver, Tier, build_tier
from torchtitan_lite.checkpoint.saving.images import Images
from torchtitan_lite.checkpoint.saving.save_plan import PlanCache
from torchtitan_lite.checkpoint.saving.writer import Origin
from torchtitan_lite.checkpoint.staging.stager import build_stager
from torchtitan_lite.checkpoint.staging.watch import build_staging_watch
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.disk.writer_process import WriterProcess
from torchtitan_lite.distributed.environment import memory_is_off, runtime_folder
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.log import logger
from torchtitan_lite.store.housekeeping import OnEvent
from torchtitan_lite.store.store import CheckpointStore


class RunMemory:
    """`tier`, None if the run has none, and `images`, None if it makes none."""

    def __init__(self, tier: Tier | None, images: Images | None, store: CheckpointStore, peers: Peers) -> None:
        self.tier = tier
        self.images = images
        self._store = store
        self._peers = peers

    def begin(self, origin: Origin) -> Origin:
        """Agree on the ids of this start, of the folder and of the run; return `origin` with them.

        **Collective**, before a load, under the lease.
        """
        if self.tier is None:
            return origin
        start, folder_id, lineage = self._peers.on_coordinator(lambda: (*self._ids(), origin.lineage))
        self.tier.begin(start, folder_id)
        if not folder_id:
            self.tier.is_off = True
        if not folder_id or self.images is None:
            return origin
        return dataclasses.replace(origin, start=start, lineage=lineage)

    def begin_keeping(self) -> None:
        """Start the keeper in the background, after a load. Idempotent, any rank."""
        if self.tier is not None and self.images is not None:
            self.tier.begin_keeping(self.images.marker.helpers)

    def take_over(self, taken: TakenOver | None) -> None:
        """Begin to keep images, after a load, in the memory that the start before left. **Collective**.

        No image that may be needed is dropped before the keeper holds it under a name of this start.
        """
        if self.tier is None:
            return
        if self._peers.is_coordinator:
            self.tier.note_commits(commits_in(self._store))
        self.begin_keeping()
        if taken is None:
            return
        if self.images is not None:
            self.images.adopt(taken.arenas, taken.num_loaded)
        else:
            for fd in [fd for pair in taken.arenas for fd in pair]:
                os.close(fd)
        self._peers.gather(None)  # All ranks have adopted theirs.
        self.tier.drop_names(taken.names)

    def wait_for_staging(self) -> None:
        """Wait until the state may change, as far as images go. Any rank."""
        if self.images is not None:
            self.images.wait_for_staging()

    def settle(self) -> None:
        """Wait until no image is being copied or digested: a load changes the state, and may take over its memory.

        Any rank.
        """
        if self.images is not None:
            self.images.wait_for_staging()
            self.images.wait(self.images.timeout_seconds)

    def finish(self) -> None:
        """Free all images: the run has finished. Any rank."""
        if self.tier is not None:
            self.tier.finish()
        if self.images is not None:
            self.images.forget_keeper()

    def close(self) -> None:
        """Wait for the digest under way. Idempotent."""
        if self.images is not None:
            self.images.close()

    def leave(self) -> None:
        """Let the images outlive this process, after the saver has been closed. Idempotent."""
        if self.tier is not None:
            self.tier.leave()

    def _ids(self) -> tuple[str, str]:
        try:
            return uuid.uuid4().hex[:16], self._store.folder_id(make=True)
        except OSError as error:
            logger.warning("No images in memory: the folder %s got no id: %s", self._store.root, error)
            return uuid.uuid4().hex[:16], ""


def build_run_memory(
    config: Checkpoint,
    store: CheckpointStore,
    plans: PlanCache,
    peers: Peers,
    clock: Callable[[], float],
    on_event: OnEvent,
) -> RunMemory:
    """Return the memory tier of a run with `config`. Touches nothing."""
    is_no_run = not config.enable_checkpoint or config.load_only or config.create_seed_checkpoint or config.dry_run
    if is_no_run or not config.memory_ttl_seconds or memory_is_off():
        return RunMemory(None, None, store, peers)
    tier = build_tier(store.root, config.memory_ttl_seconds, runtime_folder(), peers.rank)
    if config.async_mode == "disabled":
        return RunMemory(tier, None, store, peers)
    stager = build_stager(marks=True, give_up=tier.give_up)
    digests_elsewhere = config.memory_interval > 0 and not stager.can_digest
    needs_process = digests_elsewhere or config.async_mode == "async_with_pinned_mem"
    process = (
        WriterProcess(config.timeout_seconds, config.preemption_signals, rank=peers.rank) if needs_process else None
    )
    images = Images(
        tier,
        stager,
        process,
        plans,
        build_staging_watch(config),
        peers,
        clock,
        on_event,
        interval=config.memory_interval,
        timeout_seconds=config.timeout_seconds,
        owns_process=config.async_mode == "async",
    )
    return RunMemory(tier, images, store, peers)
