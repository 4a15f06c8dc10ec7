"""What each test took: written by every test run for `scripts/test_times.py`, one JSON object a line.

Seconds of the clock, and of the processors: the process of the test and all that descend from it. Where the second is
far below the first, the test waits. What a process computed that left the tree, as a keeper does, is not counted.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

NAME = "test_times.jsonl"
"""Of the file, in the folder `d/times` of pytest's cache."""
TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds(pid: int) -> float:
    """Return the seconds that `pid` and its descendants computed, those that ended and were waited for included.

    Children of other threads than the main one are left out: to look at each thread takes milliseconds a test.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()  # a name may hold any byte
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    own = sum(int(field) for field in fields[11:15]) / TICKS
    return own + sum(processor_seconds(int(child)) for child in children)


class Recorder:
    """Writes what the tests of one process took."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._fixtures: dict[str, float] = {}
        self._computed: float | None = None
        """At the end of the test before."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        before = processor_seconds(os.getpid()) if self._computed is None else self._computed
        began = time.monotonic()
        result = yield
        self._computed = processor_seconds(os.getpid())
        self._write(
            test=item.nodeid,
            seconds=round(time.monotonic() - began, 3),
            computed=round(max(0.0, self._computed - before), 3),
            fixtures={name: round(seconds, 3) for name, seconds in self._fixtures.items() if seconds >= 0.01},
        )
        self._fixtures = {}
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        began = time.monotonic()
        result = yield
        self._fixtures[fixturedef.argname] = time.monotonic() - began
        return result

    def _write(self, **entry: Any) -> None:
        line = json.dumps(entry) + "\n"
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def record(config: pytest.Config) -> None:
    """Begin a new file in the process that starts the others, and write to it in each that runs tests."""
    if not config.pluginmanager.hasplugin("cacheprovider"):
        return
    file = config.cache.mkdir("times") / NAME
    if not hasattr(config, "workerinput"):
        file.unlink(missing_ok=True)
    config.pluginmanager.register(Recorder(file))
