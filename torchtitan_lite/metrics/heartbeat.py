"""A thread that does something every few seconds, as long as the process lives.

What it does must be short and may not need the main thread: that may wait for a disk, or for other ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torchtitan_lite.log import logger

BEAT_SECONDS = 4.0
"""Seconds between two beats: with the delays of a busy machine still under the five that are promised."""


class Heartbeat:
    """Call `beat` every `seconds`, from `start` to `close`. An error of it is one warning, and the thread continues."""

    def __init__(self, beat: Callable[[], None], seconds: float = BEAT_SECONDS) -> None:
        self._beat = beat
        self._seconds = seconds
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. It does not keep the process alive."""
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; one that hangs in the disk is not waited for longer than a beat. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self._seconds)
            self._thread = None

    def _run(self) -> None:
        has_warned = False
        while not self._stop.wait(self._seconds):
            try:
                self._beat()
            except Exception as error:
                if not has_warned:
                    logger.warning("A heartbeat failed: %s: %s. Training continues", type(error).__name__, error)
                has_warned = True
