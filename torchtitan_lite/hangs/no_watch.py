"""The watch over a run that wants none (`comm.hang_seconds` at 0): none of the code of `watch` runs, or is imported."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType


class NoWatch:
    """Watches nothing. The trainer calls the same methods of one that does. A context manager, around the loop."""

    def step(self, step: int) -> None:
        """Note that the step before is over and that `step` begins."""

    def paused(self) -> AbstractContextManager[object]:
        """Do not count the time of the block, which may take as long as it needs."""
        return nullcontext()

    def __enter__(self) -> NoWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass
