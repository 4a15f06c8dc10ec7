"""What images need of replicas, which another room makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torchtitan_lite.checkpoint.staging.arena import ArenaSlot
from torchtitan_lite.memory.images.memory_budget import Room


class Replicates(Protocol):
    """Sends images of this rank to another host, if the run wants that."""

    def begin(self, found: Sequence[Room]) -> bool:
        """Agree on where replicas go, given the memory of all ranks; return whether they are made. **Collective**."""
        ...

    def numbers(self) -> tuple[int, int]:
        """Return what this rank reports to the others: that it lacks the replica that is due, and will not have it."""
        ...

    def agree(self, lacks: int, has_failed: int) -> None:
        """Note the maximum over all ranks of what they reported. Main thread; all ranks."""

    def note_staged(self, step: int, copy: int) -> None:
        """Note that the ranks are about to stage `step` as their `copy`. Main thread; all ranks."""

    def send(self, slot: ArenaSlot, copy: int) -> None:
        """Send the valid image in `slot` if that `copy` is due. Any thread."""

    def resend(self, step: int) -> None:
        """Send the image of `step`, which was loaded: the host that had its replica may be the one that was lost."""

    def close(self) -> None:
        """End the process that sends and receives. Idempotent."""
