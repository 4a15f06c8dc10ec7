"""What may use the copies that saves make, and make more of them: by default nothing.

`images/` keeps copies in memory for later starts, and is the only listener in this package. A save calls its listener
at the moments below and asks it for nothing else, so that a save can be read, and run, without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchtitan_lite.checkpoint.format.description import PlacedObject
from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.planning.rank_file import RankPlan
from torchtitan_lite.checkpoint.saving.writer import Origin, RankContent, SaveTarget
from torchtitan_lite.checkpoint.staging.stager import StagedCopy
from torchtitan_lite.store.manifest import CheckpointInfo


@dataclass(frozen=True)
class CopyOfSave:
    """The copy that a save has just begun to make, to be written as `target`."""

    target: SaveTarget
    plan: RankPlan
    objects: Sequence[PlacedObject]
    staged: StagedCopy


class CopyListener:
    """Does nothing with copies."""

    def sized(self, num_bytes: int) -> None:
        """Note how large a copy of this rank is, before the first one; -1 if that is not known. **Collective**."""

    def numbers(self) -> tuple[int, ...]:
        """Return what this rank adds to the exchange of a plan: numbers of which the maximum over all ranks counts."""
        return ()

    def agreed(self, step: int, maxima: Sequence[int]) -> None:
        """Note the maxima of all ranks' `numbers`: the copy of a save of `step` is begun next. **Collective**."""

    def copied(self, copy: CopyOfSave, content: RankContent) -> RankContent:
        """Return `content`, which waits for `copy` and writes it, with what is to be done when it has. Any rank."""
        return content

    def durable(self, committed: CheckpointInfo | None) -> None:
        """Note that a save is durable: what was committed on the coordinator, None on other ranks. Any thread."""

    def not_saved(self, step: int, make_state: Callable[[], State], make_origin: Callable[[], Origin]) -> bool:
        """Note that `step` is trained and not saved; return whether it was copied all the same. **Collective**."""
        return False
