"""Work that several threads share.

Each item is taken by one thread, in order; the caller is one of the threads and returns when all are
done. After a failure no further item is begun, and the first failure is the caller's.
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

    helpers = [threading.Thread(target=run, daemon=True) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    run()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]
