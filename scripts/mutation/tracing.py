"""Record the lines of some files that a process executes, as `sitecustomize` of every interpreter with a variable.

Each line has a byte in a file that all processes map, forked and spawned ones too: the lines of a killed process are
recorded as well, and nothing has to be collected. The reader of the bytes clears them.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

VARIABLE = "MUTATION_TRACE"
"""Environment variable with a folder that has `lines.json` (file to the byte of its line 0) and `hits`."""


def start(folder: str) -> None:
    """Mark the lines that every thread of this process executes from now on."""
    bases: dict[str, int] = json.loads(Path(folder, "lines.json").read_text(encoding="utf-8"))
    with Path(folder, "hits").open("r+b") as file:
        hits = mmap.mmap(file.fileno(), 0)
    tracers = {path: _tracer(hits, base) for path, base in bases.items()}

    def begin(frame: FrameType, event: str, argument: object) -> Any:
        return tracers.get(frame.f_code.co_filename)

    threading.settrace(begin)
    sys.settrace(begin)


def _tracer(hits: mmap.mmap, base: int) -> Any:
    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            hits[base + frame.f_lineno] = 1
        return trace

    return trace


if __name__ == "sitecustomize" and VARIABLE in os.environ:
    start(os.environ[VARIABLE])
