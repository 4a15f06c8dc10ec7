"""Folders of old checkpoints of other libraries, and what `prune --json` says of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DAY = 86400.0


def age(root: Path, seconds: float = DAY) -> None:
    """Let every file below `root` be that old."""
    written = time.time() - seconds
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            os.utime(path, (written, written))


def made(make: Callable[[Path, int], Path], root: Path, *steps: int) -> list[Path]:
    """Write checkpoints of `steps` a day ago; return their places."""
    places = [make(root, step) for step in steps]
    age(root)
    return places


def by_name(out: str) -> dict[str, Any]:
    """Return what the JSON `out` says of each checkpoint."""
    return {each["name"]: each for each in json.loads(out)["checkpoints"]}


def gone(out: str) -> list[str]:
    """Return the names of those that are removed, or would be."""
    return [name for name, each in by_name(out).items() if each["removed"]]
