"""What one rank writes: its part of the agreed plan, and the image of its file.

A `RankPlan` holds for every save of a state that is made of the same things. `Planned.image` fills it
with the tensors and objects of one state. Tensors stay live: nothing is copied here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.format.description import Description, PlacedObject
from torchtitan_lite.checkpoint.format.file_image import FileImage, FileLayout
from torchtitan_lite.checkpoint.saving.object_items import ObjectItems

State = dict[str, Any]


@dataclass(frozen=True)
class RankPlan:
    """What this rank writes, as all ranks agreed: kept from save to save."""

    file_name: str
    items: Sequence[WriteItem]
    """Chunks of tensors, in the order of the file."""
    object_keys: Sequence[str]
    layout: FileLayout
    description: Description | None
    """On the coordinator."""


@dataclass(frozen=True)
class RankImage:
    """The file of this rank, complete in memory: live tensors, encoded objects, and where each of them lies."""

    plan: RankPlan
    file: FileImage
    objects: Sequence[PlacedObject]


@dataclass(frozen=True)
class Planned:
    """A state that all ranks have a plan for."""

    plan: RankPlan
    _flat: State
    _object_items: ObjectItems

    def image(self) -> RankImage:
        """Return this rank's file.

        Raises on this rank alone, for a state that cannot be written as planned: the saver reports that failure to the
        other ranks with the save, so that it costs no exchange of its own.
        """
        plan = self.plan
        objects = {key: self._flat[key] for key in plan.object_keys}
        encoded, placed = self._object_items.lay_out(objects, plan.file_name, plan.layout.end)
        tensors = [_local(self._flat, item.index) for item in plan.items]
        return RankImage(plan, FileImage(plan.layout, tensors, encoded, self._volatile()), placed)

    def _volatile(self) -> set[int]:
        """Return the numbers of the tensors that more than the optimizer's step may change: buffers."""
        return {number for number, item in enumerate(self.plan.items) if not self._is_the_optimizers(item.index.fqn)}

    def _is_the_optimizers(self, key: str) -> bool:
        fqn = key.removeprefix("model.")
        # A setting that is a tensor (lr) is a scheduler's to change.
        return key.startswith("optimizer.state.") or f"optimizer.param_groups.{fqn}.lr" in self._flat


def _local(flat: State, index: MetadataIndex) -> torch.Tensor:
    value: torch.Tensor = flat[index.fqn]
    return value.to_local() if isinstance(value, DTensor) else value
