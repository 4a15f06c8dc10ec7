"""The figures of a run: in metrics.jsonl, TensorBoard files, and on its page at Weights & Biases.

A run and its restarts are one history, in which every logged step is present once. So a resumed run drops the lines
after the step that it loaded, and a fresh start moves an older history aside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_lite.config.job_config import Metrics
from torchtitan_lite.errors import ExtraMissing
from torchtitan_lite.json_lines import JsonLines, start_history
from torchtitan_lite.log import logger

if TYPE_CHECKING:
    from torchtitan_lite.metrics.tensorboard_file import TensorBoardFile

METRICS_FILE = "metrics.jsonl"


class MetricsLogger:
    """Write figures by step to {dump_folder}/metrics.jsonl (rank 0) and to TensorBoard files (as the config says).

    With `writes` false, write nothing.
    """

    def __init__(self, dump_folder: Path, config: Metrics, *, rank: int, writes: bool = True) -> None:
        self._lines = JsonLines(dump_folder / METRICS_FILE) if rank == 0 and writes else None
        self._tensorboard = _tensorboard_file(dump_folder, config, rank) if writes else None

    def start(self, loaded_step: int) -> None:
        """Drop the history after `loaded_step`; at 0, a fresh start, begin a new one. Call before the next `log`."""
        if self._lines is not None:
            self._lines.close()  # Of a run that rolled back by itself: the file is replaced.
            start_history(self._lines.path, loaded_step)
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard.start(loaded_step + 1)

    def log(self, step: int, tags: Mapping[str, float]) -> None:
        """Write `tags` of `step` to the files. Other processes can read them when it returns."""
        if self._lines is not None:
            # JSON has no NaN and no infinity.
            figures = {tag: value if math.isfinite(value) else None for tag, value in tags.items()}
            self._lines.append({"step": step} | figures)
        if self._tensorboard is not None:
            self._tensorboard.log(step, tags)

    def close(self) -> None:
        """Close all files. Idempotent."""
        if self._lines is not None:
            self._lines.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _tensorboard_file(dump_folder: Path, config: Metrics, rank: int) -> TensorBoardFile | None:
    if not config.enable_tensorboard or (config.rank_0_only and rank != 0):
        return None
    # Imported only here: its libraries take 0.04 s, at each start of each rank, and most ranks write no such file.
    from torchtitan_lite.metrics.tensorboard_file import TensorBoardFile

    folder = dump_folder / config.save_tb_folder
    return TensorBoardFile(folder if config.rank_0_only else folder / f"rank_{rank}")


# A run at Weights & Biases. All restarts of a run have one id there, and so one page and one set of curves.
#
# The id is that of the first start in the ledger. Curves are drawn over the run's own step, not over wandb's count of
# calls, because a restart trains steps again. wandb itself reads WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and the key. A
# failure of the service is one warning: it never ends the run.


class WandbRun:
    """A run whose files are in the folder wandb in `dump_folder`. Raises ExtraMissing."""

    def __init__(self, dump_folder: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ExtraMissing.of(error, "wandb") from error
        self._wandb: Any = wandb
        self._dump_folder = dump_folder
        self._run: Any = None

    def begin(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Begin this start of the run `run_id`."""
        with self._unless_it_fails():
            self._run = self._wandb.init(
                id=run_id,
                resume="allow",
                dir=str(self._dump_folder),
                config=dict(config),
                settings=self._wandb.Settings(console="off"),  # The log lines stay the process's own.
            )
            self._run.define_metric("*", step_metric="step")

    def log(self, step: int, tags: Mapping[str, float]) -> None:
        """Log `tags` of `step`."""
        if self._run is not None:
            with self._unless_it_fails():
                self._run.log({"step": step} | dict(tags))

    def close(self, *, failed: bool) -> None:
        """Send what is left, and end this start of the run. Idempotent."""
        if self._run is not None:
            with self._unless_it_fails():
                self._run.finish(exit_code=int(failed))
            self._run = None

    @contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        """Warn of an error in the block, and do without the service from then on."""
        try:
            yield
        except Exception as error:
            self._run = None
            logger.warning("Weights & Biases: %s: %s. Training continues without it", type(error).__name__, error)
