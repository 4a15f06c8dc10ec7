"""A run with its folder in an object store, killed before, during and after each of its requests."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.bucket.proxy import FATES, Proxy, at, killing
from tests.bucket.training import train
from tests.examples import mostly_exhaustive
from tests.forked import run_script

SCRIPT = Path(__file__).with_name("training.py")
STEPS = 3
MODES = ("disabled", "async", "async_with_pinned_mem")
APART = 27
"""Of this many requests, one is a point in the runs that do not try all."""


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, str]:
    """The digest after each step of a run on a disk that never stopped."""
    return train("checkpoint", tmp_path_factory.mktemp("straight"), "disabled", STEPS)


class Start:
    """One start of the run, and what it said."""

    def __init__(self, proxy: Proxy, folder: str, mode: str, tmp_path: Path) -> None:
        self._log = tmp_path / "log"
        self._log.write_text("")
        arguments = [folder, str(tmp_path / "dump"), mode, str(STEPS)]
        environment = {**os.environ, **proxy.environment, "OMP_NUM_THREADS": "1"}
        self._process = run_script(SCRIPT, arguments, self._log, environment)

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> int:
        return self._process.wait(120)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]

    @property
    def acknowledged(self) -> int:
        """The latest step that was committed, as the process heard."""
        return max((line["committed"] for line in self.lines() if "committed" in line), default=0)

    def __str__(self) -> str:
        return self._log.read_text()


def killed_at(number: int, fate: str, proxy: Proxy, folder: str, mode: str, tmp_path: Path) -> int:
    """Start the run and kill it around request `number`; return the latest step that was acknowledged."""
    started: Future[int] = Future()
    proxy.again(at(number, killing(started, fate)))
    start = Start(proxy, folder, mode, tmp_path)
    started.set_result(start.pid)
    start.end()
    return start.acknowledged


def num_requests(proxy: Proxy, folder: str, mode: str, tmp_path: Path) -> int:
    """Return how many requests a run makes from its start to its end."""
    proxy.again()
    start = Start(proxy, folder, mode, tmp_path)
    assert start.end() == 0, start
    return len(proxy.log)


@pytest.mark.promise(
    "A run that is killed around any of its requests loses no reported save and trains as if it was not killed.",
    section="bucket",
)
@pytest.mark.parametrize(
    "apart", [pytest.param(APART, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("mode", mostly_exhaustive(MODES, kept=("async",)))
def test_killed_at_any_request_it_loses_nothing_that_was_acknowledged_and_trains_as_if_it_was_not(
    proxy: Proxy, folder: str, mode: str, fate: str, apart: int, tmp_path: Path, straight: Mapping[int, str]
) -> None:
    count = num_requests(proxy, f"{folder}-counted", mode, tmp_path)
    assert count > 30
    for number in range(1 + FATES.index(fate), count + 1, apart):
        own = f"{folder}-{number}"
        acknowledged = killed_at(number, fate, proxy, own, mode, tmp_path)
        proxy.again()
        start = Start(proxy, own, mode, tmp_path)
        assert start.end() == 0, (number, str(start))
        loaded, *_, ended = (line for line in start.lines() if "committed" not in line)
        assert loaded["loaded"] >= acknowledged, number
        assert loaded["loaded"] == 0 or loaded["digest"] == straight[loaded["loaded"]], number
        assert ended == {"ended": STEPS, "digest": straight[STEPS]}, number
