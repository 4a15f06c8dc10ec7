"""Processes of tests, as the system shows them, and the lines that they write while they live."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 120.0
"""The longest wait for what takes a moment on an idle machine."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSON-lines file that another process may be writing."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait_until(
    condition: Callable[[], Any],
    log: Callable[[], str] = str,
    is_over: Callable[[], Any] = lambda: False,
    seconds: float = DEADLINE_SECONDS,
) -> bool:
    """Return True as soon as `condition` holds, False once all `is_over` without it; fail with `log` at a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing happened for {seconds:.0f} s:\n{log()}"
        if is_over():
            return bool(condition())
        time.sleep(0.002)
    return True


def children(pid: int) -> list[int]:
    """Return the process ids of all descendants; none of a process that has ended."""
    own = own_children(pid)
    return [*own, *(grandchild for child in own for grandchild in children(child))]


def own_children(pid: int) -> list[int]:
    """Return the process ids of those that `pid` started itself; none of a process that has ended."""
    try:
        tasks = [*Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        tasks = []
    return [int(child) for task in tasks for child in _read(task / "children").split()]


def command_line(pid: int) -> str:
    return _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ")


def kill_with_children() -> None:
    """Kill this process and what it has started: workers that have just begun do not see that their parent is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Of a killed worker torch would raise an error here.
    for pid in (*children(os.getpid()), os.getpid()):
        send(pid, signal.SIGKILL)


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
