"""Work that several threads share.

Each item is taken by one thread, in order. The caller is one of the threads. It returns, or raises, only when no thread
works any more, because the memory they work on may be freed after that. After a failure (an interrupt of the caller is
one, too) no further item is begun, and the caller raises the first failure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def in_threads(items: Iterable[T], threads: int, make_worker: Callable[[], Callable[[T], None]]) -> None:
    """Give each of `items` to one of `threads` workers; `make_worker` is called once in each thread."""
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
        # The system has no more threads: those that started do all of the work.
        pass
    except BaseException as error:
        failures.append(error)
    try:
        run()
    except BaseException as error:
        failures.append(error)
    for helper in helpers:
        # A helper without an ident has not begun, and will see the failure before it takes an item.
        if helper.ident is not None:
            _wait_for_helper(helper, failures)
    if failures:
        raise failures[0]


class _Helper(threading.Thread):
    """A thread with an event for its end. (After an interrupted `join`, threading takes a thread for ended.)"""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            self._work()
        finally:
            self.ended.set()


def _wait_for_helper(helper: _Helper, failures: list[BaseException]) -> None:
    """Wait until `helper` has ended, however often the caller is interrupted meanwhile."""
    while True:
        try:
            helper.ended.wait()
            return helper.join()
        except BaseException as error:
            failures.append(error)
