"""A text file for Prometheus' node exporter: what the ledger counts, and figures of the last logged step.

Each write replaces the file, so the collector reads it whole. It is not durable: a beat later it is replaced again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from torchtitan_lite.accounts import Accounts
from torchtitan_lite.disk.durable import DISK, temporary_name
from torchtitan_lite.log import logger

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
