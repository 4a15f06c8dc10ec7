"""The seconds of each part of a step.

These are seconds of the host: on an accelerator a part ends when its kernels are launched, not when they finish, and
the wait counts for the part that needs a result.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LAST_PART = "optimizer"


class StepTimer:
    """Seconds by part: data, forward, backward, optimizer. A step ends with its `optimizer` part."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._num_steps = 0

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Add the seconds of the block to `part`, which may come several times in one step."""
        start = self._clock()
        yield
        self._seconds[part] += self._clock() - start
        self._num_steps += part == LAST_PART

    def pop(self) -> dict[str, float]:
        """Return the mean seconds per step since the last call, by part, and reset them."""
        means = {part: seconds / max(1, self._num_steps) for part, seconds in self._seconds.items()}
        self._seconds.clear()
        self._num_steps = 0
        return means
