"""Whose turn it is: one image at a time is replicated, the same on all ranks."""

from __future__ import annotations

from torchtitan_lite.checkpoint.images.card import ImageKey

_PATIENCE = 3
"""Images that this rank may stage while it has not begun to send the one that is due."""


class Turns:
    """Which image all ranks replicate, as this rank knows: the same on all, because only the exchange changes it."""

    def __init__(self) -> None:
        self.complete: ImageKey | None = None
        """The latest image whose replicas are complete everywhere."""
        self.due: ImageKey | None = None
        """The one that all ranks replicate now; None for none."""
        self.is_sent = self.has_failed = False
        """How far this rank is with it."""
        self._waited = 0

    def begin(self, key: ImageKey) -> None:
        """Make `key` due, after the exchange in which all ranks were done with the one before."""
        self.due, self.is_sent, self.has_failed, self._waited = key, False, False, 0

    def numbers(self, *, is_sending: bool) -> tuple[int, int]:
        """Return whether this rank still lacks the replica that is due, and whether it will not have one."""
        lacks = self.due is not None and not self.is_sent
        if lacks and not is_sending:
            # An image that was never complete here would hold up all ranks for good.
            self._waited += 1
            self.has_failed |= self._waited > _PATIENCE
        return lacks, self.has_failed

    def agree(self, lacks: int, has_failed: int) -> None:
        """Note the maximum over all ranks of their numbers."""
        if self.due is not None and not lacks:
            self.complete, self.due = self.due, None
        elif has_failed:
            # Another rank may still send it; all begin the next one together.
            self.due = None
