"""What one rank writes: its part of the agreed plan, and the bytes of its file.

A `RankPlan` is valid for every state of the same structure. `PlannedSave.file` fills it with the tensors
and objects of one state. The tensors are live: nothing is copied here.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.format.description import Description, PlacedObject
from torchtitan_lite.checkpoint.format.file_data import FileData, FileLayout
from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.planning.object_items import ObjectItems
from torchtitan_lite.checkpoint.planning.own_entries import OwnEntries
from torchtitan_lite.errors import RanksDiffer


@dataclass(frozen=True)
class RankPlan:
    """The items that this rank writes, as the ranks agreed; the same from save to save."""

    file_name: str
    items: Sequence[WriteItem]
    """Chunks of tensors, in file order."""
    object_keys: Sequence[str]
    layout: FileLayout
    description: Description | None
    """Of the complete checkpoint; coordinator only, None on other ranks."""
    volatile: Set[int] = frozenset()
    """The numbers, in file order, of the tensors that forward may change, not only the optimizer's step."""
    own: OwnEntries | None = None
    """What goes into the record of this rank; None if the manifest has all."""


@dataclass(frozen=True)
class RankFile:
    """The complete file of this rank: live tensors, encoded objects, and where each of them lies."""

    plan: RankPlan
    data: FileData
    objects: Sequence[PlacedObject]


@dataclass(frozen=True)
class PlannedSave:
    """A state and the plan that the ranks agreed on for it."""

    plan: RankPlan
    _flat: State
    _object_items: ObjectItems
    agreed: tuple[int, ...] = ()
    """The maximum over all ranks of each number that came with the state."""
    differs: RanksDiffer | None = None
    """Why a checkpoint cannot have the state: ranks hold different values under one name. The same on all ranks."""
    corruption: str = ""
    """Where ranks differ that were equal before; empty if none does."""

    def file(self) -> RankFile:
        """Return this rank's file, complete. Any rank.

        Raises on this rank only, TypeError for an object that cannot be saved and ValueError for a tensor that is not
        as planned. The saver passes the failure on to the other ranks within the save, which costs no exchange of its
        own.
        """
        plan = self.plan
        objects = {key: self._flat[key] for key in plan.object_keys}
        # Objects become bytes here, while the caller waits: a loader that changes its state later cannot change the
        # save.
        encoded, placed = self._object_items.lay_out(objects, plan.file_name, plan.layout.end)
        values = [self._flat[item.index.fqn] for item in plan.items]
        tensors = [value.to_local() if isinstance(value, DTensor) else value for value in values]
        return RankFile(plan, FileData(plan.layout, tensors, encoded, plan.volatile), placed)
