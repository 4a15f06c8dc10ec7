"""What has to end before the interpreter does, where nobody closed it: sys.exit, an exception, the end of main.

The threads that save do not keep the process, so that one that hangs cannot either: what they write is
waited for here, and no longer than it says. Held strongly, for the loop may have let go of its manager.
"""

from __future__ import annotations

import atexit
from typing import Protocol

from torchtitan_lite.log import logger


class Unfinished(Protocol):
    """Something under way."""

    def end_at_exit(self) -> None:
        """Wait for it, for a time that is bounded. Not collective: peers may be gone."""


_UNFINISHED: list[Unfinished] = []


def end_at_exit(unfinished: Unfinished) -> None:
    """Have `unfinished.end_at_exit()` called at the interpreter's exit, unless `is_finished` is called before."""
    if not _UNFINISHED:
        # Now and not at import: what is registered last is called first, while process groups are there.
        atexit.unregister(_end_all)
        atexit.register(_end_all)
    _UNFINISHED.append(unfinished)


def is_finished(unfinished: Unfinished) -> None:
    """Hold `unfinished` no longer. Any thread; idempotent."""
    _UNFINISHED[:] = [each for each in _UNFINISHED if each is not unfinished]


def _end_all() -> None:
    for each in list(_UNFINISHED):
        try:
            each.end_at_exit()
        except Exception as error:
            logger.warning("A save could not be ended at the interpreter's exit: %s", error)
