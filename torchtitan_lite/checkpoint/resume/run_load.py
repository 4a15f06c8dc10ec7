"""The load of a run: tries candidates, the latest first, until one is undamaged.

load_source and fallback decide which checkpoints are candidates; restore loads one. Every method is **collective**.
"""

from __future__ import annotations

import gc
from contextlib import suppress

from torchtitan_lite import faults
from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.reading.files import Files
from torchtitan_lite.checkpoint.reading.source import LoadSource, Sources, Wanted
from torchtitan_lite.checkpoint.resume.fallback import Candidates
from torchtitan_lite.checkpoint.resume.restore import Owners, Restore
from torchtitan_lite.checkpoint.resume.resume_report import ResumeReport
from torchtitan_lite.checkpoint.resume.wrong_folder import neighbour_with_steps, refuse_wrong_folders
from torchtitan_lite.checkpoint.run_folders import RunFolders
from torchtitan_lite.checkpoint.state.run_state import RunState
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.events import Loaded, LoadStarted
from torchtitan_lite.log import logger
from torchtitan_lite.stores import usable


class RunLoad:
    """Loads a checkpoint of `folders`, or one that `sources` offers, into the objects of `run`."""

    def __init__(
        self,
        run: RunState,
        folders: RunFolders,
        config: JobConfig,
        topology: str,
        sources: Sources,
        context: RunContext,
    ) -> None:
        self._run = run
        self._folders = folders
        self._store = folders.checkpoints
        self._config = config
        self._topology = topology
        self.sources = sources
        """What there is to load besides the checkpoints on disk."""
        self._peers, self._clock, self._emit = context.peers, context.clock, context.emit

    def load(self, step: int) -> LoadSource | None:
        """Load `step` itself, or for -1 what the config says; return what was loaded, None for a fresh start.

        With -1, finishes an interrupted rollback. Raises `CheckpointNotFound`, `CheckpointMismatch`,
        `AllCheckpointsDamaged`, and the error of a state that refuses, on every rank. After an error `sources.close`.
        """
        config = self._config.checkpoint
        is_exact, step = step != -1, config.load_step if step == -1 else step
        if step == -1:
            self._peers.on_coordinator(usable(self._store.address)(self._warn_of_unmanaged))
        self.sources.look(self._topology)
        source = self._take(Wanted(step, config, is_exact=is_exact))
        if source is None:
            self._report_neighbour()
            logger.info("No checkpoint in %s: a fresh start", self._store.address)
        return source

    def load_back(self) -> LoadSource:
        """Load what the last rollback on record rolls back to. Raises as `load` does."""
        source = self._take(Wanted(-1, self._config.checkpoint, rolls_back=True))
        assert source is not None, "choose_source raises where there is none"
        return source

    def report(self) -> ResumeReport | None:
        """Return what `load` would do and what it would refuse; None for a fresh start. Changes nothing.

        Raises ConfigError where the start would refuse the folder.
        """
        config = self._config.checkpoint
        self._peers.on_coordinator(lambda: refuse_wrong_folders(self._folders, config, -1))
        source = Candidates(self._store, Wanted(config.load_step, config), self._peers, self._emit).first()
        if source is None:
            self._report_neighbour()
            return None
        self._report_skipped(source)
        return self._restore(source).report()

    def _take(self, wanted: Wanted) -> LoadSource | None:
        candidates = Candidates(self._store, wanted, self._peers, self._emit, sources=self.sources)
        for source in candidates:
            with candidates.trying(source):
                self._load(wanted.step, source)
        return candidates.taken

    def _load(self, step: int, source: LoadSource) -> None:
        self._report_choice(step, source)
        began = self._clock()
        logger.info("Loading the checkpoint at step %d.", source.saved_at)
        self._emit(LoadStarted(source.step, path=str(source.path), origin=source.origin))
        faults.set_step(source.step)
        faults.point("load")
        with self.sources.opened(source, self._store.address) as files:
            restore = self._restore(source, files)
            restore.run()
        if restore.has_restored_rng and self._peers.is_coordinator:  # One rank warns for all, and does nothing else.
            with suppress(Exception):
                self._run.late_seed.after_load(source.step)
        # What the load itself left. A look at all objects takes 0.1 s, where the loop has not frozen its imports.
        gc.collect(1)
        seconds = self._clock() - began
        logger.info("Finished loading the checkpoint in %.2f seconds.%s", seconds, source.remark)
        at_risk_steps, at_risk_seconds = source.at_risk
        self._emit(
            Loaded(
                source.step,
                path=str(source.path),
                seconds=seconds,
                bytes=source.nbytes,
                origin=source.origin,
                at_risk_steps=at_risk_steps,
                at_risk_seconds=at_risk_seconds,
            )
        )

    def _report_choice(self, step: int, source: LoadSource) -> None:
        self._report_skipped(source)
        if source.initial:
            logger.info("Starting from %s", source.path)
        elif step not in (-1, source.step):
            logger.info("Rolled back to step %d before: resuming from step %d of that branch", step, source.step)
        if source.lineage.counts_again:
            logger.info("Counting steps from the start again; the first save sets the old run's checkpoints aside")

    def _warn_of_unmanaged(self) -> None:
        for path in self._store.unmanaged():
            logger.warning("%s has no manifest and is skipped. --checkpoint.load_step loads it", path)

    def _report_skipped(self, source: LoadSource) -> None:
        if source.skipped and self._peers.is_coordinator:
            logger.warning(
                "Skipped step %s: ranks held different values when it was saved, as torchtitan-lite inspect shows. "
                "--checkpoint.load_step %d loads it anyway",
                ", ".join(map(str, source.skipped)),
                source.skipped[-1],
            )

    def _report_neighbour(self) -> None:
        root = self._store.root
        if not self._peers.is_coordinator or root is None:
            return
        if found := neighbour_with_steps(root):
            logger.warning(
                "%s has no checkpoint, but %s has, up to %s. If you mean that run, name its folder",
                root,
                found.parent,
                found.name,
            )

    def _restore(self, source: LoadSource, files: Files | None = None) -> Restore:
        owners = Owners(self._run.model, self._run.optimizer, self._run.small)
        return Restore(source, self._config, self._peers, owners, topology=self._topology, files=files)
