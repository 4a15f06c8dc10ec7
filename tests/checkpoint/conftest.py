"""Fixtures of the checkpoint tests: small runs, with each of the three ways to save."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.savers import Lent
from tests.checkpoint.small_run import SmallRun
from tests.clock import Clock
from tests.examples import mostly_slow
from torchtitan_lite.checkpoint.saving.in_flight import InFlightSave
from torchtitan_lite.checkpoint.saving.savers import ProcessSaver
from torchtitan_lite.distributed.peers import Peers

MODES = ("disabled", "async", "async_with_pinned_mem")
StartRun = Callable[..., SmallRun]


@pytest.fixture(scope="session", autouse=True)
def _saves_that_are_left_behind() -> Iterator[None]:
    """Let the test process exit without waiting for saves that some tests leave unfinished for ever."""
    yield
    gc.unfreeze()  # Objects that are frozen are not listed.
    for each in gc.get_objects():
        if type(each) is InFlightSave:
            atexit.unregister(each.end_at_exit)


@pytest.fixture(scope="session")
def process_saver() -> Iterator[ProcessSaver]:
    """Return one saver for all tests, because its writer process takes seconds to start."""
    saver = ProcessSaver(Peers(timedelta(seconds=60)), timeout_seconds=60)
    yield saver
    saver.close(60)


@pytest.fixture
def start_run(tmp_path: Path, process_saver: ProcessSaver) -> Iterator[StartRun]:
    """Return a function that starts a run in the test's folder. All runs are closed at the end of the test."""
    with ExitStack() as stack:

        def start(folder: Path = tmp_path, *, seams: dict[str, Any] | None = None, **options: Any) -> SmallRun:
            lent: dict[str, Any] = {"clock": Clock()}
            if options.get("async_mode") == "async_with_pinned_mem":
                lent["saver"] = Lent(process_saver)
            run = SmallRun(folder, seams=lent | (seams or {}), **options)
            stack.callback(run.manager.close)
            return run

        yield start


@pytest.fixture(params=mostly_slow(MODES, kept=("disabled", "async_with_pinned_mem")))
def mode(request: pytest.FixtureRequest) -> str:
    """Return each `async_mode` in turn."""
    name: str = request.param
    return name
