"""The time of this start, by what the main thread does: parts that are disjoint and sum to the time since the start.

At each moment the start is in exactly one part; `part` changes it for a block. The first step counts as compiling until
the second one has shown what a step takes: then so much of it moves to the part of the steps. The names of the parts
are in `accounts`.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST, LAST = "starting", "leaving"


class RunClock:
    """Count seconds from `began`, a reading of `clock`; by default from now. Only the main thread changes the part."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, began: float | None = None) -> None:
        self._clock = clock
        self._since = self._began = clock() if began is None else began
        self._part = FIRST
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._num_steps = 0
        self._first_step: tuple[str, float] | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the start. **Any thread**."""
        return self._clock() - self._began

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part that there was so far. **Any thread**."""
        with self._lock:
            now = self._clock()
            return {**self._seconds, self._part: self._seconds[self._part] + now - self._since}

    def enter(self, part: str) -> None:
        """Count the time from now on for `part`, unless the start is leaving."""
        with self._lock:
            now = self._clock()
            self._seconds[self._part] += now - self._since
            self._since = now
            self._part = LAST if self._part == LAST else part

    @contextmanager
    def part(self, part: str) -> Iterator[None]:
        """Count the block for `part`, and what comes after it as before."""
        before = self._part
        self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def leave(self) -> None:
        """Count the present stay in a part, and all that follows, for leaving."""
        with self._lock:
            self._part = LAST

    @contextmanager
    def step(self, part: str) -> Iterator[None]:
        """Count the block, a step of training, for `part`; see the module for the first one."""
        self._num_steps += 1
        if self._num_steps > 2:
            with self.part(part):
                yield
            return
        first = self._num_steps == 1
        began, before = self.elapsed, self._seconds["saving"]
        with self.part("compiling" if first else part):
            yield
        seconds = self.elapsed - began - (self._seconds["saving"] - before)
        if first:
            self._first_step = (part, seconds)
        elif self._first_step is not None:
            part_of_first, seconds_of_first = self._first_step
            self._move(min(seconds, seconds_of_first), part_of_first)

    def _move(self, seconds: float, to: str) -> None:
        with self._lock:
            seconds = min(seconds, self._seconds["compiling"])
            self._seconds["compiling"] -= seconds
            self._seconds[to] += seconds
