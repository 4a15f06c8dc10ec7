"""A system that has no more threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def no_threads(named: str = "") -> Iterator[None]:
    """Refuse every new thread in the block, or those whose name begins with `named`, as the system would."""
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name.startswith(named):
            raise RuntimeError("can't start new thread")
        start(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield
