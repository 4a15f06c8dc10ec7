"""The load of a run: tries candidates, the latest first, until one is undamaged.

load_source and fallback decide which checkpoints are candidates; restore loads one. Every method is **collective**.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

from torchtitan_lite import faults
from torchtitan_lite.checkpoint.memory.tier import TakenOver, Tier
from torchtitan_lite.checkpoint.reading.files import Files
from torchtitan_lite.checkpoint.resume.fallback import Candidates
from torchtitan_lite.checkpoint.resume.held_images import HeldImages, Key
from torchtitan_lite.checkpoint.resume.image_bytes import lent_parts, verify_images
from torchtitan_lite.checkpoint.resume.load_source import InMemory, LoadSource
from torchtitan_lite.checkpoint.resume.restore import Restore
from torchtitan_lite.checkpoint.resume.resume_report import ResumeReport
from torchtitan_lite.checkpoint.resume.wrong_folder import neighbour_with_steps, refuse_wrong_folders
from torchtitan_lite.checkpoint.state.run_state import RunState
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointMismatch
from torchtitan_lite.log import counted, logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.housekeeping import OnEvent
from torchtitan_lite.store.manifest import Manifest
from torchtitan_lite.store.run_folders import RunFolders


class RunLoad:
    """Loads a checkpoint of `folders` into the objects of `run`."""

    def __init__(
        self,
        run: RunState,
        folders: RunFolders,
        config: JobConfig,
        topology: str,
        peers: Peers,
        clock: Callable[[], float],
        on_event: OnEvent,
        tier: Tier | None = None,
    ) -> None:
        self._run = run
        self._folders = folders
        self._store = folders.checkpoints
        self._config = config
        self._peers = peers
        self._topology = topology
        self._clock = clock
        self._on_event = on_event
        self._tier = tier
        self._images: HeldImages | None = None

    def load(self, step: int) -> LoadSource | None:
        """Load `step` itself, or for -1 what the config says; return what was loaded, None for a fresh start.

        Raises `CheckpointNotFound`, `CheckpointMismatch`, `AllCheckpointsDamaged`, and the error of a state that
        refuses, on every rank.
        """
        wanted = step if step != -1 else self._config.checkpoint.load_step
        if self._tier is not None:
            keeper = None if self._tier.is_off else self._tier.keeper
            self._images = HeldImages(keeper, self._tier.start, self._peers)
            self._images.look(topology=self._topology)
        candidates = self._candidates(wanted, is_exact=step != -1)
        candidates.images = self._images
        try:
            source = candidates.take(lambda source: self._load(wanted, source))
        except BaseException:
            self._forget_images()
            raise
        if source is None:
            self._report_unmanaged(wanted)
            self._report_neighbour()
            logger.info("No checkpoint in %s: a fresh start", self._store.root)
        return source

    def take_over(self, source: LoadSource | None) -> TakenOver | None:
        """Return what this rank takes over from the start before, after `load` returned `source`; None for nothing.

        The caller owns the descriptors. The same on every rank whether it is None.
        """
        images, self._images = self._images, None
        if images is None or not images.are_any:
            return None
        memory = source.memory if source is not None else None
        return images.shared_out(None if memory is None else Key.of_source(memory))

    def report(self) -> ResumeReport | None:
        """Return what `load` would do and what it would refuse; None for a fresh start. Changes nothing.

        Raises ConfigError where the start would refuse the folder.
        """
        self._peers.on_coordinator(lambda: refuse_wrong_folders(self._folders, self._config.checkpoint, -1))
        source = self._candidates(self._config.checkpoint.load_step).first()
        if source is None:
            self._report_neighbour()
        return None if source is None else self._restore(source).report()

    def _candidates(self, wanted: int, *, is_exact: bool = False) -> Candidates:
        config = self._config.checkpoint
        return Candidates(self._store, wanted, config, self._peers, self._on_event, is_exact=is_exact)

    def _load(self, wanted: int, source: LoadSource) -> None:
        self._report_choice(wanted, source)
        began = self._clock()
        logger.info("Loading the checkpoint at step %d.", source.saved_at)
        origin = "disk" if source.memory is None else "memory"
        self._on_event("load_started", source.step, path=str(source.path), origin=origin)
        faults.set_step(source.step)
        faults.point("load")
        gc.collect()
        if source.memory is None:
            self._restore(source).run()
        else:
            self._load_images(source, source.memory)
        gc.collect()
        seconds = self._clock() - began
        addition = "" if source.memory is None else f" From memory: the images of the start before{_lacking(source)}"
        logger.info("Finished loading the checkpoint in %.2f seconds.%s", seconds, addition)
        figures = {"path": str(source.path), "seconds": seconds, "bytes": source.nbytes, "origin": origin}
        self._on_event("loaded", source.step, **figures, **source.at_risk.figures)

    def _forget_images(self) -> None:
        """Close the images: no load takes them over. The keeper has them for the next start."""
        if self._images is not None:
            self._images.close()
            self._images = None

    def _load_images(self, source: LoadSource, memory: InMemory) -> None:
        """Load `source` from the images on this host; they are unmapped on return."""
        assert self._images is not None
        images, peers = self._images, self._peers
        manifest = Manifest.parse(memory.manifest, str(source.path / layout.MANIFEST))
        files = images.files(Key.of_source(memory), manifest, is_spread=memory.is_spread)
        try:
            if memory.is_spread:
                files.borrow(peers.gather_made(lambda: lent_parts(source, files)))
            if memory.is_last_resort:
                # What a load has changed, nothing on disk could put right.
                peers.together(lambda: verify_images(source, files, peers.rank, peers.world_size))
            self._restore(source, files).run()
        except CheckpointMismatch as error:
            if memory.is_copy:
                raise  # The step on disk does not fit either.
            raise _of_image(error, source, self._store.root) from None
        finally:
            files.close()

    def _report_choice(self, wanted: int, source: LoadSource) -> None:
        self._report_unmanaged(wanted)
        if source.initial:
            logger.info("Starting from %s", source.path)
        elif wanted not in (-1, source.step):
            logger.info("Rolled back to step %d before: resuming from step %d of that branch", wanted, source.step)
        if source.lineage.counts_again:
            logger.info("Counting steps from the start again; the first save sets the old run's checkpoints aside")

    def _report_unmanaged(self, wanted: int) -> None:
        for path in self._store.unmanaged() if self._peers.is_coordinator and wanted == -1 else []:
            logger.warning("%s has no manifest and is skipped. To load it, name its step or path", path)

    def _report_neighbour(self) -> None:
        root = self._store.root
        if self._peers.is_coordinator and (found := neighbour_with_steps(root)):
            logger.warning(
                "%s has no checkpoint, but %s has, up to %s. If that run is meant, name its folder",
                root,
                found.parent,
                found.name,
            )

    def _restore(self, source: LoadSource, files: Files | None = None) -> Restore:
        return Restore(
            source,
            self._config,
            self._peers,
            model=self._run.model,
            optimizer=self._run.optimizer,
            small_states=self._run.small,
            topology=self._topology,
            files=files,
        )


def _lacking(source: LoadSource) -> str:
    steps, seconds = source.at_risk
    return f"; the disk lacks {counted(steps, 'step')} ({seconds:.1f} s of training)" if steps else ""


def _of_image(error: CheckpointMismatch, source: LoadSource, root: Path) -> CheckpointMismatch:
    """Return `error` about the image `source` of the folder `root`, with the image's name and how to leave it out."""
    path = f"the image of step {source.step} in memory" if error.path == str(source.path) else error.path
    way_out = (
        f"  It was read from memory. To load from disk, or to begin from scratch if nothing is there, free it: "
        f"torchtitan-lite memory {root} --end"
    )
    named = CheckpointMismatch(path, f"{error.report}\n{way_out}")
    named.origin_rank, named.reported_elsewhere = error.origin_rank, error.reported_elsewhere
    return named
