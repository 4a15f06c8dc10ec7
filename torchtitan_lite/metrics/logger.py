"""The figures of a run: in metrics.jsonl, TensorBoard files, its page at Weights & Biases, a file for Prometheus.

A run and its restarts are one history, in which every logged step is present once. So a resumed run drops the lines
after the step that it loaded, and a fresh start moves an older history aside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_lite.accounts import Accounts
from torchtitan_lite.config.job_config import Metrics
from torchtitan_lite.disk.durable import DISK, temporary_name
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


# A text file for Prometheus' node exporter: what the ledger counts, and figures of the last logged step.
#
# Each write replaces the file, so the collector reads it whole. It is not durable: a beat later it is replaced again.


_LOGGED = {
    "loss": ("loss_metrics/global_avg_loss", "Loss of the last logged step."),
    "tokens_per_second": ("throughput(tps)", "Tokens a second and device."),
}

_UPLOADS = {
    "uploaded_step": "The last step that is in the upload folder.",
    "uploaded_timestamp_seconds": "Unix seconds at which it was complete there.",
    "uploaded_bytes_per_second": "How fast it was sent.",
    "upload_failures": "Tries to upload that failed, in this start.",
}


class PrometheusFile:
    """The file at `path`, of the run that is labelled `run`."""

    def __init__(self, path: Path, run: str) -> None:
        self._path = path
        self._run = run
        self._has_failed = False
        self.logged: Mapping[str, float] = {}
        """The tags of the last logged step. Replace it as a whole: another thread reads it."""
        self.uploads: Mapping[str, float] = {}
        """Figures of the uploads, by name. Replace it as a whole, too."""

    def write(self, accounts: Accounts, at_risk: tuple[int, float], *, is_up: bool) -> None:
        """Replace the file; if the disk refuses, log one warning. **Any thread**, one at a time."""
        text = self._text(accounts, at_risk, is_up=is_up)
        temporary = self._path.with_name(temporary_name(self._path.name))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8", errors="replace")  # A folder's name need not be UTF-8.
            DISK.replace(temporary, self._path)
        except OSError as error:
            if not self._has_failed:
                logger.warning("Could not write %s: %s. Training continues", self._path, error)
            self._has_failed = True

    def _text(self, accounts: Accounts, at_risk: tuple[int, float], *, is_up: bool) -> str:
        """Return the figures in Prometheus' text format; all are gauges."""
        last, logged = accounts.starts[-1], self.logged
        figures: list[tuple[str, str, Mapping[str, float]]] = [
            ("up", "1 while the run lives, 0 after an orderly end.", {"": float(is_up)}),
            ("beat_timestamp_seconds", "Unix seconds of the last sign of life.", {"": last.last_beat}),
            ("time_seconds", "Seconds since the first start, by part.", accounts.seconds),
            ("goodput_ratio", "The part of all time that was productive.", {"": accounts.goodput}),
            ("starts", "Starts of the run.", {"": len(accounts.starts)}),
            ("redone_steps", "Steps that were trained again after a restart.", {"": accounts.redone_steps}),
            ("step", "The last step that is trained.", {"": last.last_step}),
            ("durable_step", "The last step that is on disk.", {"": last.durable_step}),
            ("at_risk_steps", "Steps that the disk lacks.", {"": at_risk[0]}),
            ("at_risk_seconds", "Seconds of training that the disk lacks.", {"": at_risk[1]}),
        ]
        figures += [(name, about, {"": logged[tag]}) for name, (tag, about) in _LOGGED.items() if tag in logged]
        figures += [(name, _UPLOADS[name], {"": value}) for name, value in self.uploads.items()]
        return "".join(_gauge(name, about, values, self._run) for name, about, values in figures)


def _gauge(name: str, about: str, values: Mapping[str, float], run: str) -> str:
    full = f"torchtitan_lite_{name}"
    label = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    parts = {part: f',part="{part}"' if part else "" for part in values}
    lines = [f'{full}{{run="{label}"{parts[part]}}} {_prometheus_number(value)}' for part, value in values.items()]
    return "\n".join((f"# HELP {full} {about}", f"# TYPE {full} gauge", *lines)) + "\n"


def _prometheus_number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
