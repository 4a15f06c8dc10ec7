"""Work to finish before the interpreter exits where no code closed it: sys.exit, an exception, the end of main.

The threads that save are daemon threads, so one that hangs cannot keep the process alive. Saves under way are waited
for here instead, each for a bounded time. The list holds strong references: the loop may have dropped its manager.
"""

from __future__ import annotations

import atexit
from typing import Protocol

from torchtitan_lite.log import logger


class Unfinished(Protocol):
    """Work under way."""

    def end_at_exit(self) -> None:
        """Wait for the work, for a bounded time. Not collective: peers may be gone."""


_UNFINISHED: list[Unfinished] = []


def end_at_exit(unfinished: Unfinished) -> None:
    """Call `unfinished.end_at_exit()` at the interpreter's exit, unless `is_finished` is called first."""
    if not _UNFINISHED:
        # Register now, not at import: atexit calls the last one first, while the process groups still exist.
        atexit.unregister(_end_all)
        atexit.register(_end_all)
    _UNFINISHED.append(unfinished)


def is_finished(unfinished: Unfinished) -> None:
    """Drop `unfinished` from the list. Any thread; idempotent."""
    _UNFINISHED[:] = [each for each in _UNFINISHED if each is not unfinished]


def _end_all() -> None:
    for each in list(_UNFINISHED):
        try:
            each.end_at_exit()
        except Exception as error:
            logger.warning("Could not finish a save at the exit of the interpreter: %s", error)
