"""Acts while a block of code takes too long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def if_overdue(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` once, in a thread, if the block takes longer than `seconds`. Any rank."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
