"""Run `torchtitan-lite` in this process, in another one, or on a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.screens import terminal
from torchtitan_lite.cli import screen
from torchtitan_lite.cli.app import main

ROOT = Path(__file__).parents[2]
CLI = (sys.executable, "-m", "torchtitan_lite.cli")


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[list[str]]:
        """The words of each line of the result."""
        return [line.split() for line in self.out.splitlines()]


def command(*arguments: str | Path) -> Ended:
    """Run it in this process; its output goes into a pipe, as far as it can see, without lines of progress."""
    out, err = io.StringIO(), io.StringIO()
    silent, screen.SILENT_SECONDS = screen.SILENT_SECONDS, math.inf
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([str(argument) for argument in arguments])
    finally:
        screen.SILENT_SECONDS = silent
    return Ended(code, out.getvalue(), err.getvalue())


def on_a_terminal(*arguments: str | Path, columns: int = 80) -> tuple[int, str]:
    """Run it on a terminal with `columns` columns; return its exit code and the screen, colours included."""
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    with terminal(columns) as shown:
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), shown.stream)
        with subprocess.Popen([*CLI, *map(str, arguments)], **streams, env=environment) as process:
            shown.shown_at_end()
    return process.returncode, shown.received.replace("\r\n", "\n")


def plain(screen: str) -> str:
    """Return `screen` without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", screen)
