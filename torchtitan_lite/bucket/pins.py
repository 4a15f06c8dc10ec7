"""The steps that no rule removes, of a folder in an object store: they stand in its head.

A step is retired by a swap of the same object, and only if it is not pinned in the version that is replaced; so once a
pin has been written, no job removes the step, and no lock is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan_lite.bucket.head_file import HeadFile


class BucketPins:
    """The pinned steps in the head `file`. Every method raises OSError if they cannot be known."""

    def __init__(self, file: HeadFile) -> None:
        self.path = file.path
        self._file = file

    def read(self) -> frozenset[int]:
        """Return the pinned steps; none in a new folder."""
        try:
            return self._file.read()[0].pinned
        except FileNotFoundError:
            return frozenset()

    @contextmanager
    def unchanged(self) -> Iterator[frozenset[int]]:
        """Yield the pinned steps. One that is pinned in the block is not retired by a swap in it."""
        yield self.read()

    @contextmanager
    def changing(self) -> Iterator[set[int]]:
        """Yield the pinned steps, to be changed in the block; then write them, if they are others.

        Raises FileNotFoundError in a folder without a head, and OSError: then they may be written or not.
        """
        # Without the lease: people pin while a job trains. That job's next swap reads them again.
        before = self._file.read()[0].pinned
        steps = set(before)
        yield steps
        self._file.change(lambda head: head.with_pins(steps - before, before - steps))
