"""The descriptors that a process has open."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests.processes import wait_until

_FOLDER = "/proc/self/fd"


def num_open() -> int:
    """Return how many descriptors are open."""
    return len(os.listdir(_FOLDER))  # noqa: PTH208  # numbers, not paths


def wait_for_open(number: int) -> None:
    """Return once `number` descriptors are open: other threads, as of a test before, may open others for a moment."""
    wait_until(lambda: num_open() == number, lambda: f"{num_open()} descriptors are open, expected {number}")


def wait_for_no_more(before: Counter[str]) -> None:
    """Return once nothing is open but what was when `before` was counted from `opened`, of which others may close some.

    What must stay open is to be looked at by itself.
    """
    wait_until(lambda: not Counter(opened()) - before, lambda: f"also open: {Counter(opened()) - before}")


def opened(pid: int | str = "self") -> list[str]:
    """Return what a process has open: a path, or `socket:[...]` and the like. What it closes meanwhile is left out."""
    names = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            names.append(str(descriptor.readlink()))
    return names


def num_open_of(*memories: str) -> int:
    """Return how many of memory files with one of these names, and of this process itself, are open.

    Other threads, as of a test before, may open and close others meanwhile.
    """
    wanted = {f"/memfd:{name} (deleted)" for name in memories}
    found = 0
    for fd in os.listdir(_FOLDER):  # noqa: PTH208  # numbers, not paths
        with suppress(OSError):  # It was closed meanwhile.
            target = os.readlink(f"{_FOLDER}/{fd}")  # noqa: PTH115  # likewise
            found += target in wanted or (target == "anon_inode:[pidfd]" and _is_of_this_process(fd))
    return found


def _is_of_this_process(pidfd: str) -> bool:
    lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    return f"Pid:\t{os.getpid()}" in lines
