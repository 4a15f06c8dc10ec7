"""A saver whose saves become durable when a test says so, and take the seconds that its fake clock shows."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.saving.savers import PendingSave
from torchtitan_lite.checkpoint.saving.target import SaveTarget
from torchtitan_lite.errors import SaveFailed


class GatedSaver:
    """Blocks for no time, unless `while_blocked` moves the clock, and then writes until `finish` or `fail`."""

    def __init__(self, while_blocked: Callable[[], object] = lambda: None) -> None:
        self._while_blocked = while_blocked
        self._durable: Future[Any] = Future()
        self._step = -1

    def start(self) -> None: ...

    def prepare(self, get_state: Callable[[], State]) -> None: ...

    def compare_alongside(self, get_state: Callable[[], State]) -> None: ...

    def save(self, state: State, target: SaveTarget) -> PendingSave:
        self._while_blocked()
        staged: Future[None] = Future()
        staged.set_result(None)
        self._durable, self._step = Future(), target.step
        return PendingSave(target.step, staged, self._durable)

    def finish(self) -> None:
        """Make the last save durable, unless it is."""
        if not self._durable.done():
            self._durable.set_result(None)

    def fail(self) -> None:
        """Make the last save fail."""
        self._durable.set_exception(SaveFailed(self._step, "the test says so"))

    def close(self, timeout_seconds: float) -> None: ...
