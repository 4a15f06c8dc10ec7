"""The record of how often a run rolled back by itself, in an object of its folder: what store/rollbacks says of it."""

from __future__ import annotations

from collections.abc import Sequence

from torchtitan_lite.bucket.objects import Objects
from torchtitan_lite.errors import CheckpointUnreadable
from torchtitan_lite.store import layout
from torchtitan_lite.store.rollbacks import Rollback, parse, to_json


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
