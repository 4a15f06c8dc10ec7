"""Work that several threads share: each item once, and a failure ends it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest

from torchtitan_lite.store.in_threads import in_threads


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_each_item_is_worked_on_once_by_one_of_the_workers(threads: int) -> None:
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
def test_a_failure_is_the_callers_and_nothing_is_begun_after_it(threads: int) -> None:
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


def test_nobody_is_at_work_any_more_when_an_interrupted_caller_goes_on() -> None:
    begun, interrupted, ended = threading.Event(), threading.Event(), threading.Event()
    caller = threading.get_ident()

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def work(item: int) -> None:
        if threading.get_ident() == caller:
            begun.wait()
            return
        begun.set()
        signal.pthread_kill(caller, signal.SIGINT)
        interrupted.wait()
        ended.set()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            in_threads(range(2), 2, lambda: work)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.is_set()


def test_where_the_system_has_no_more_threads_those_that_are_there_do_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    in_threads(range(10), 3, lambda: done.append)
    assert done == list(range(10))


def test_where_there_is_nothing_to_do_nothing_is_done() -> None:
    in_threads([], 2, lambda: lambda item: pytest.fail("there is no item"))
