"""Imports the weights that `initial_load_in_hf` names into a run's folder, as its step 0, which the load then takes.

Only a run without a checkpoint imports: from then on it has one, so the same command serves for restarts. The import
itself is a function of whoever knows the model; it leaves a complete step 0, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.resume.load_source import has_full
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.events import WeightsImported
from torchtitan_lite.log import logger, readable_bytes
from torchtitan_lite.store import layout
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.stores import usable

ImportWeights = Callable[[Path, Path], Sequence[str]]
"""Writes the weights at the first path as a checkpoint of step 0 to the second; returns facts for the log."""

_BY_COMMAND = (
    "Run torchtitan-lite import-weights SOURCE OUT, set --checkpoint.initial_load_path to OUT, and leave "
    "initial_load_in_hf out."
)


class InitialImport:
    """Imports into `store` with `import_weights`. Raises ConfigError if the run wants an import and that is None.

    `is_elsewhere` returns whether the run has a checkpoint in another folder; on the coordinator.
    """

    def __init__(
        self,
        store: StoresCheckpoints,
        import_weights: ImportWeights | None,
        context: RunContext,
        is_elsewhere: Callable[[], bool] = bool,
    ) -> None:
        config = context.config
        if config.initial_load_in_hf and config.enable_checkpoint and import_weights is None:
            raise ConfigError(f"checkpoint.initial_load_in_hf: only the trainer knows its model's names. {_BY_COMMAND}")
        if config.initial_load_in_hf and config.enable_checkpoint and store.root is None:
            raise ConfigError(
                f"checkpoint.initial_load_in_hf: an import needs a folder on disk, found {store.address}. {_BY_COMMAND}"
            )
        self._store, self._is_elsewhere = store, is_elsewhere
        self._config = config
        self._import_weights = import_weights
        self._peers, self._clock, self._emit = context.peers, context.clock, context.emit

    def due(self) -> Path | None:
        """Return what the load would import first; None if the run has a checkpoint, or imports none. **Collective**.

        Changes nothing.
        """
        config = self._config
        if not config.initial_load_in_hf or config.load_step != -1:
            return None
        look = usable(self._store.address)(lambda: has_full(self._store) or self._is_elsewhere())
        return None if self._peers.on_coordinator(look) else Path(config.initial_load_path)

    def run(self) -> None:
        """Import what is due; the other ranks wait at most `checkpoint.timeout_seconds`. **Collective**.

        Raises ConfigError for a run that only loads, and for another model; and what reading the weights raises.
        """
        if (source := self.due()) is None:
            return
        if self._config.load_only:
            raise ConfigError(
                f"checkpoint.initial_load_in_hf: {self._store.address} has no checkpoint, and a run with load_only "
                f"imports none into it. {_BY_COMMAND}"
            )
        self._peers.on_coordinator(lambda: self._import(source))

    def _import(self, source: Path) -> None:
        assert self._import_weights is not None, "the constructor refuses that"
        out = Path(self._store.address) / layout.step_dir(0)
        logger.info("Importing %s as step 0", source)
        began = self._clock()
        with usable(self._store.address):
            for note in self._import_weights(source, out):
                logger.info("%s", note)
        seconds = self._clock() - began
        num_bytes = next(info.nbytes for info in self._store.committed() if info.step == 0)
        logger.info("Imported %s as step 0: %s in %.2f s", source, readable_bytes(num_bytes), seconds)
        self._emit(WeightsImported(0, path=str(source), bytes=num_bytes, seconds=seconds))
