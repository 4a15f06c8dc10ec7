"""A small run with its folder in an object store, as a process that a test kills.

    python tests/bucket/training.py ADDRESS DUMP_FOLDER MODE STEPS

Prints a line of JSON when it has loaded, for each committed step, and at its end, with a digest of all that a
checkpoint restores.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.small_run import SmallRun


def train(address: str, dump_folder: Path, mode: str, steps: int) -> dict[int, str]:
    """Train up to step `steps`, saving each; return the digest of the contents after each step that was trained."""
    settings: dict[str, Any] = {"interval": 1, "keep_latest_k": 2, "async_mode": mode, "folder": address}
    digests = {}
    with SmallRun(dump_folder, **settings, seams={"on_event": _note}).loaded() as run:
        _say(loaded=run.train_state.step, digest=digest_of(run.contents()))
        while run.train_state.step < steps:
            run.step(last=run.train_state.step + 1 == steps)
            digests[run.train_state.step] = digest_of(run.contents())
    _say(ended=run.train_state.step, digest=digest_of(run.contents()))
    return digests


def digest_of(value: Any) -> str:
    """Return a digest of a nest of dicts, lists, numbers and tensors."""
    digest = hashlib.sha256()

    def add(each: Any) -> None:
        if isinstance(each, dict):
            for key in sorted(each):
                digest.update(repr(key).encode())
                add(each[key])
        elif isinstance(each, list):
            digest.update(b"[")
            for one in each:
                add(one)
        else:
            digest.update(each.numpy().tobytes() if isinstance(each, torch.Tensor) else repr(each).encode())

    add(value)
    return digest.hexdigest()


def _note(event: str, step: int, /, **figures: Any) -> None:
    if event == "committed":
        _say(committed=step)


def _say(**line: Any) -> None:
    os.write(1, (json.dumps(line) + "\n").encode())  # One write: another thread may say something, too.


if __name__ == "__main__":
    address, dump_folder, mode, steps = sys.argv[1:]
    train(address, Path(dump_folder), mode, int(steps))
