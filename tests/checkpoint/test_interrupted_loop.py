"""Ctrl-C raises KeyboardInterrupt in a notebook, or wherever SIGINT is not watched: the manager works on after it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.savers import ObservedSaver
from torchtitan_lite.checkpoint.saving.savers import SyncSaver, ThreadSaver
from torchtitan_lite.distributed.peers import Peers

PEERS = Peers(timedelta(seconds=60))


@pytest.fixture(autouse=True)
def _sigint_raises() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_main_in(function: str) -> None:
    """Send SIGINT to the main thread as soon as it is in a call of `function`."""
    main = threading.main_thread().ident
    assert main is not None
    while True:
        frame = sys._current_frames()[main]
        names = []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
        if function in names and names[0] in ("wait", "acquire"):
            return signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.001)


@pytest.mark.parametrize("interrupted", ["wait", "save", "load", "close"])
def test_a_save_that_a_wait_was_interrupted_for_is_awaited_again(start_run: StartRun, interrupted: str) -> None:
    may_continue, saver = threading.Event(), ObservedSaver(ThreadSaver(PEERS))
    run = start_run(interval=1, async_mode="async", seams={"saver": saver})

    def before_write(path: Path) -> None:
        saver.before_write = lambda path: None
        interrupt_main_in("outcome")
        if interrupted != "close":  # That continues to close, and waits here.
            may_continue.wait(60)

    saver.before_write = before_write
    run.train(1, last=False)
    with pytest.raises(KeyboardInterrupt):
        if interrupted == "save":
            run.train(2, last=False)
        else:
            getattr(run.manager, interrupted)()
    may_continue.set()
    if interrupted == "close":
        run.manager.close()
        assert run.committed() == [1]
        return
    step = run.train_state.step
    assert run.manager.save(step + 1, force=True)
    assert run.committed() == [1, step + 1]


def test_an_interrupt_in_a_save_that_training_waits_for_is_no_failure_of_the_save(start_run: StartRun) -> None:
    saver = ObservedSaver(SyncSaver(PEERS))
    run = start_run(interval=1, seams={"saver": saver})
    saver.before_write = lambda path: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run.train(1, last=False)
    saver._over.set()
    saver.before_write = lambda path: None
    run.train(2)
    assert run.committed() == [2]
    assert run.events.steps("save_failed") == []
