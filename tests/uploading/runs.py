"""Runs whose checkpoints are uploaded, and what is in a folder of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.checkpoint.small_run import SmallRun
from torchtitan_lite.store.store import CheckpointStore


def run_of(folder: Path, other: Path | str, **config: Any) -> SmallRun:
    """Return a run in `folder` that saves each step and uploads it to `other`."""
    return SmallRun(folder, interval=1, upload_folder=str(other), **config)


def steps_in(folder: Path) -> list[int]:
    return [info.step for info in CheckpointStore(folder).committed()]
