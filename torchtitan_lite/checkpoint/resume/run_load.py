"""The load of a run: tries candidates, the latest first, until one is undamaged.

load_source and fallback decide which checkpoints are candidates; restore loads one. Every method is **collective**.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from torchtitan_lite import faults
from torchtitan_lite.checkpoint.resume.fallback import Candidates
from torchtitan_lite.checkpoint.resume.load_source import LoadSource
from torchtitan_lite.checkpoint.resume.restore import Restore
from torchtitan_lite.checkpoint.resume.resume_report import ResumeReport
from torchtitan_lite.checkpoint.state.run_state import RunState
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.distributed.consensus import Peers
from torchtitan_lite.log import logger
from torchtitan_lite.store.housekeeping import OnEvent
from torchtitan_lite.store.store import CheckpointStore


class RunLoad:
    """Loads a checkpoint of `store` into the objects of `run`."""

    def __init__(
        self,
        run: RunState,
        store: CheckpointStore,
        config: JobConfig,
        topology: str,
        peers: Peers,
        clock: Callable[[], float],
        on_event: OnEvent,
    ) -> None:
        self._run = run
        self._store = store
        self._config = config
        self._peers = peers
        self._topology = topology
        self._clock = clock
        self._on_event = on_event

    def load(self, step: int) -> LoadSource | None:
        """Load `step` itself, or for -1 what the config says; return what was loaded, None for a fresh start.

        Raises `CheckpointNotFound`, `CheckpointMismatch`, `AllCheckpointsDamaged`, and the error of a state that
        refuses, on every rank.
        """
        wanted = step if step != -1 else self._config.checkpoint.load_step
        source = self._candidates(wanted, is_exact=step != -1).take(lambda source: self._load(wanted, source))
        if source is None:
            self._report_unmanaged(wanted)
            logger.info("No checkpoint in %s: a fresh start", self._store.root)
        return source

    def report(self) -> ResumeReport | None:
        """Return what `load` would do and what it would refuse; None for a fresh start. Changes nothing."""
        source = self._candidates(self._config.checkpoint.load_step).first()
        return None if source is None else self._restore(source).report()

    def _candidates(self, wanted: int, *, is_exact: bool = False) -> Candidates:
        config = self._config.checkpoint
        return Candidates(self._store, wanted, config, self._peers, self._on_event, is_exact=is_exact)

    def _load(self, wanted: int, source: LoadSource) -> None:
        self._report_choice(wanted, source)
        began = self._clock()
        logger.info("Loading the checkpoint at step %d.", source.saved_at)
        self._on_event("load_started", source.step, path=str(source.path))
        faults.set_step(source.step)
        faults.point("load")
        gc.collect()
        self._restore(source).run()
        gc.collect()
        seconds = self._clock() - began
        logger.info("Finished loading the checkpoint in %.2f seconds.", seconds)
        self._on_event("loaded", source.step, path=str(source.path), seconds=seconds, bytes=source.nbytes)

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

    def _restore(self, source: LoadSource) -> Restore:
        return Restore(
            source,
            self._config,
            self._peers,
            model=self._run.model,
            optimizer=self._run.optimizer,
            small_states=self._run.small,
            topology=self._topology,
        )
