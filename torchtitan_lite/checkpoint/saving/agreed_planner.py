"""To DCP, a rank whose plan is made and agreed on already.

DCP's `save` gathers a plan of every rank, and scatters them again. Here they are empty: who writes
what was agreed before (save_plan.py), and what remains of DCP's protocol is what is needed, that a
failure of one rank is every rank's and that the coordinator finishes after all have written.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem


class AgreedPlanner(SavePlanner):
    """Plans nothing; raises `failure`, if this rank has one, where every rank learns of it."""

    def __init__(self, failure: Exception | None = None) -> None:
        self._failure = failure

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the state was looked at before."""

    def create_local_plan(self) -> SavePlan:
        if self._failure is not None:
            raise self._failure
        return SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        raise AssertionError("an empty plan has nothing to resolve")
