"""Work that several threads share: each item once, and a failure ends it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

import pytest

from torchtitan_lite.disk.threads import Background, in_threads


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_each_item_is_processed_once_by_one_of_the_workers(threads: int) -> None:
    done: list[int] = []
    workers = 0

    def make_worker() -> Callable[[int], None]:
        nonlocal workers
        workers += 1
        return done.append

    in_threads(range(1000), threads, make_worker)
    assert sorted(done) == list(range(1000))
    assert workers == threads


@pytest.mark.parametrize("threads", [1, 3])
def test_a_failure_is_raised_in_the_caller_and_nothing_is_begun_after_it(threads: int) -> None:
    before = threading.active_count()
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        raise OSError(item)

    with pytest.raises(OSError):
        in_threads(range(1000), threads, lambda: work)
    assert len(begun) <= threads
    assert threading.active_count() == before


def test_a_worker_that_cannot_be_made_is_a_failure_too() -> None:
    def make_worker() -> Callable[[int], None]:
        raise MemoryError

    with pytest.raises(MemoryError):
        in_threads([1], 2, make_worker)


def test_no_thread_works_any_more_when_an_interrupted_caller_continues() -> None:
    begun, interrupted, ended = threading.Event(), threading.Event(), threading.Event()
    caller = threading.get_ident()

    def interrupt(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def work(item: int) -> None:
        if threading.get_ident() == caller:
            begun.wait()
            return
        begun.set()
        # One that arrives right before the caller blocks is handled when something wakes it: here, the next one.
        while not interrupted.is_set():
            signal.pthread_kill(caller, signal.SIGINT)
        ended.set()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            in_threads(range(2), 2, lambda: work)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.is_set()


def test_when_the_system_has_no_more_threads_those_that_started_do_all_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    in_threads(range(10), 3, lambda: done.append)
    assert done == list(range(10))


def test_without_items_nothing_is_done() -> None:
    in_threads([], 2, lambda: lambda item: pytest.fail("there is no item"))


def test_an_interrupt_at_the_moment_when_the_caller_begins_is_not_lost() -> None:
    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        if (frame.f_code.co_name, frame.f_globals["__name__"]) == ("run", in_threads.__module__):
            raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            in_threads(range(3), 1, lambda: lambda item: None)
    finally:
        sys.settrace(before)


def test_a_caller_that_is_interrupted_while_waiting_keeps_waiting_and_then_raises() -> None:
    caller, begun, ended = threading.get_ident(), threading.Event(), threading.Event()

    def is_waiting() -> bool:
        frame: FrameType | None = sys._current_frames()[caller]
        names = []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        return names[0] == "wait" and "_wait_for_helper" in names

    def interrupt(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def make_worker() -> Callable[[int], None]:
        if threading.get_ident() == caller:
            begun.wait()  # It gets no item.
        return work

    def work(item: int) -> None:
        begun.set()
        while not is_waiting():
            pass
        # One that arrives right before the caller blocks is handled when something wakes it: here, the next one.
        while not interrupted.is_set():
            signal.pthread_kill(caller, signal.SIGINT)
        ended.set()

    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            in_threads(range(1), 2, make_worker)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.is_set()


def test_tasks_that_have_not_begun_when_their_queue_is_closed_are_dropped() -> None:
    background, begun, released, done = Background("test"), threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        begun.set()
        released.wait(60)
        done.append("first")

    background.run("first", first)
    assert begun.wait(60)
    background.run("second", lambda: done.append("second"))
    assert not background.close(0)
    released.set()
    assert background.wait(60)
    assert done == ["first"]
