"""The steps that no rule removes.

They stand in one file of the folder of checkpoints, never inside a checkpoint, which is sealed. The file is replaced
as a whole, so a reader sees the old pins or the new ones. A job reads it before it removes anything, and again, under
the lock of the folder, right before each removal; so once `pin` has returned, no job removes the step. A file that
cannot be read, or is not what this module writes, may hold any pin: callers then remove nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite.disk.durable import DISK, Durable
from torchtitan_lite.disk.lock_file import locked
from torchtitan_lite.disk.plain_file import read_plain
from torchtitan_lite.errors import CheckpointUnsafe, PinsUnreadable
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest_fields import json_bytes, json_object, steps_field

VERSION = 1
_LIMIT_BYTES = 1 << 20
# A `pin` that is stopped must not stop training.
_A_JOB_WAITS_SECONDS = 0.5
"""For `pin`, which takes milliseconds. A job that does not get the lock removes the checkpoint after its next save."""
_A_PERSON_WAITS_SECONDS = 10.0


class Pins:
    """The pinned steps of the folder of checkpoints `root`, which exists."""

    def __init__(self, root: Path, durable: Durable = DISK) -> None:
        self.path = root / layout.PINS
        self._durable = durable

    def read(self) -> frozenset[int]:
        """Return the pinned steps. Raise PinsUnreadable if they cannot be known."""
        try:
            data = read_plain(self.path, _LIMIT_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return frozenset()
        except CheckpointUnsafe as error:
            raise PinsUnreadable(str(self.path), error.finding) from error
        except OSError as error:
            raise PinsUnreadable(str(self.path), error.strerror or str(error)) from error
        try:
            document = json_object(data)
            if document.get("version") != VERSION:
                raise ValueError(f'expected a JSON object with "version": {VERSION}')
            return steps_field(document, "pinned")
        except (ValueError, RecursionError) as error:
            raise PinsUnreadable(str(self.path), str(error)) from error

    @contextmanager
    def unchanged(self) -> Iterator[frozenset[int]]:
        """Yield the pinned steps, which stay the same in the block. Raise as `read` does, or BlockingIOError."""
        with locked(self.path.parent, _A_JOB_WAITS_SECONDS):
            yield self.read()

    @contextmanager
    def changing(self) -> Iterator[set[int]]:
        """Yield the pinned steps, to be changed in the block; then write them, durably, if they are others.

        Raises as `unchanged` does.
        """
        # Not under the lease: people pin while a job trains, and that job holds the lease.
        with locked(self.path.parent, _A_PERSON_WAITS_SECONDS):
            before = self.read()
            steps = set(before)
            yield steps
            if steps != before:
                document = {"version": VERSION, "pinned": sorted(steps)}
                self._durable.write_atomically(self.path, json_bytes(document))
