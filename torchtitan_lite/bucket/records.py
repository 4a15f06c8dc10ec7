"""What a folder in an object store notes next to its checkpoints: pinned steps, in its head, and rollbacks.

A step is retired by a swap of the same object, and only if it is not pinned in the version that is replaced; so once a
pin has been written, no job removes the step, and no lock is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torchtitan_lite.bucket.head_file import HeadFile
from torchtitan_lite.bucket.objects import Objects
from torchtitan_lite.errors import CheckpointUnreadable
from torchtitan_lite.store import layout
from torchtitan_lite.store.rollbacks import Rollback, parse, to_json


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


class BucketRollbacks:
    """The record in the folder of `objects`."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def read(self) -> tuple[Rollback, ...]:
        """Return the rollbacks, the first one first. Raises `CheckpointUnreadable`, and CheckpointError as `parse`."""
        path = f"{self._objects.address}/{layout.ROLLBACKS}"
        try:
            return parse(self._objects.get(layout.ROLLBACKS)[0], path)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise CheckpointUnreadable(path, str(error)) from error

    def write(self, rollbacks: Sequence[Rollback]) -> None:
        """Replace the record. **Coordinator only**, under the lease. Raises OSError."""
        self._objects.put(layout.ROLLBACKS, to_json(rollbacks))
