"""Runs with an injected fault, on each rank."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from tests.checkpoint.tiny_run import TinyRun, at_steps
from torchtitan_lite import faults


def run_with(fault: str, rank: int, folder: Path, mode: str, **options: Any) -> TinyRun:
    """Return a run in which `fault` happens; saves are due at steps 1, 2 and 5 unless `options` say otherwise."""
    run = TinyRun(folder, async_mode=mode, **{"seams": {"save_policy": at_steps(1, 2, 5)}, **options})
    faults.install(fault, rank=rank)
    inner: Any = run.saver.inner
    writer = getattr(getattr(inner, "_saver", inner), "process", None)
    if writer is not None:
        writer.close()  # The next one starts with the fault.
    return run


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
