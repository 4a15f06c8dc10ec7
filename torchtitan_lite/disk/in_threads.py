"""Work that several threads share.

Each item is taken by one thread, in order; the caller is one of the threads and returns, or raises, when
none of them is at work any more: what they work on may be gone after that. After a failure, which an
interrupt of the caller is too, no further item is begun, and the first failure is the caller's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def in_threads(items: Iterable[T], threads: int, make_worker: Callable[[], Callable[[T], None]]) -> None:
    """Each of `items` was given to one of the workers that `make_worker` makes, one for each of `threads`."""
    waiting = iter(items)
    lock = threading.Lock()
    failures: list[BaseException] = []
    nothing = object()

    def run() -> None:
        try:
            work = make_worker()
            while not failures:
                with lock:
                    item = next(waiting, nothing)
                if item is nothing:
                    return
                work(item)  # type: ignore[arg-type]  # it is an item
        except BaseException as error:
            failures.append(error)

    helpers = [_Helper(run) for _ in range(threads - 1)]
    try:
        for helper in helpers:
            helper.start()
    except RuntimeError:
        pass  # The system has no more threads: those that are there do all of it.
    except BaseException as error:
        failures.append(error)
    try:
        run()
    except BaseException as error:
        failures.append(error)
    for helper in helpers:
        # One without a number has not begun, and will find the failure before it takes an item.
        if helper.ident is not None:
            _wait_for(helper, failures)
    if failures:
        raise failures[0]


class _Helper(threading.Thread):
    """A thread that says when it ends. (A `join` that was interrupted takes it for ended at once.)"""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            self._work()
        finally:
            self.ended.set()


def _wait_for(helper: _Helper, failures: list[BaseException]) -> None:
    """`helper` has ended, however often the caller is interrupted meanwhile."""
    while True:
        try:
            helper.ended.wait()
            return helper.join()
        except BaseException as error:
            failures.append(error)
