"""A run at Weights & Biases. All restarts of a run have one id there, and so one page and one set of curves.

The id is that of the first start in the ledger. Curves are drawn over the run's own step, not over wandb's count of
calls, because a restart trains steps again. wandb itself reads WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and the key. A
failure of the service is one warning: it never ends the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torchtitan_lite.errors import ExtraMissing
from torchtitan_lite.log import logger


def import_wandb() -> ModuleType:
    """Return the module wandb. Raises ExtraMissing."""
    try:
        import wandb
    except ImportError as error:
        raise ExtraMissing.of(error, "wandb") from error
    found: ModuleType = wandb
    return found


class WandbRun:
    """The run `run_id`, whose files are in the folder wandb in `dump_folder`."""

    def __init__(self, wandb: ModuleType, dump_folder: Path, run_id: str, config: Mapping[str, Any]) -> None:
        self._run: Any = None
        try:
            self._run = wandb.init(
                id=run_id,
                resume="allow",
                dir=str(dump_folder),
                config=dict(config),
                settings=wandb.Settings(console="off"),  # The log lines stay the process's own.
            )
            self._run.define_metric("*", step_metric="step")
        except Exception as error:
            self._give_up(error)

    def log(self, step: int, tags: Mapping[str, float]) -> None:
        """Log `tags` of `step`."""
        if self._run is not None:
            try:
                self._run.log({"step": step} | dict(tags))
            except Exception as error:
                self._give_up(error)

    def close(self, *, failed: bool) -> None:
        """Send what is left, and end this start of the run. Idempotent."""
        if self._run is not None:
            run, self._run = self._run, None
            try:
                run.finish(exit_code=int(failed))
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        logger.warning("Weights & Biases: %s: %s. Training continues without it", type(error).__name__, error)
