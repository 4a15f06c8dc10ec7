"""A DCP planner for ranks that have agreed on a plan already.

DCP's `save` gathers a plan of every rank and scatters them again. Here these plans are empty, because
planning/plan_cache.py has decided who writes what. The rest of DCP's protocol is what a save needs: a failure of
one rank is raised on every rank, and the coordinator finishes after all ranks have written.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem


class AgreedPlan(SavePlan):
    """A plan without items, which brings the name of the save's `place` to a rank."""

    def __init__(self, place: str = "") -> None:
        super().__init__([], storage_data=place)

    def __reduce__(self) -> tuple[Callable[[str], AgreedPlan], tuple[str]]:
        # One comes from each rank, and one goes to each: a dataclass would take three times as long.
        return agreed_plan, (self.storage_data,)


@functools.lru_cache(maxsize=1)
def agreed_plan(place: str) -> AgreedPlan:
    """Return the plan with this `place`: the same for all ranks."""
    return AgreedPlan(place)


class AgreedPlanner(SavePlanner):
    """Plans nothing. Raises `failure`, if this rank has one, in the planning phase, which all ranks share."""

    def __init__(self, failure: Exception | None = None) -> None:
        self._failure = failure

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: `PlanCache` has examined the state."""

    def create_local_plan(self) -> SavePlan:
        if self._failure is not None:
            raise self._failure
        return AgreedPlan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        raise AssertionError("an empty plan has nothing to resolve")
