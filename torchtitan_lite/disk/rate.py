"""How fast bytes may pass."""

from __future__ import annotations

import time
from collections.abc import Callable


class Rate:
    """Lets `bytes_per_second` pass on average, without a burst after a pause; 0: any number. One thread at a time."""

    def __init__(
        self,
        bytes_per_second: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_second = bytes_per_second
        self._clock, self._sleep = clock, sleep
        self._free_at = clock()

    def wait_for(self, num_bytes: int) -> None:
        """Return when `num_bytes` more may be sent."""
        if not self._bytes_per_second:
            return
        now = self._clock()
        begin = max(now, self._free_at)
        self._free_at = begin + num_bytes / self._bytes_per_second
        if begin > now:
            self._sleep(begin - now)
