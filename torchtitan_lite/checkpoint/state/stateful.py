"""A run's objects as `Stateful`s: the model, the optimizers and the LR schedulers, and the protocol itself."""

from __future__ import annotations

from typing import Any, Protocol

from torchtitan_lite.checkpoint.state.model import ModelWrapper
from torchtitan_lite.checkpoint.state.optimizer import OptimizerWrapper
from torchtitan_lite.checkpoint.state.per_rank import PerRank
from torchtitan_lite.checkpoint.state.schedulers import LRSchedulerWrapper

__all__ = ["LRSchedulerWrapper", "ModelWrapper", "OptimizerWrapper", "PerRank", "Stateful"]


class Stateful(Protocol):
    """Anything that can be in a checkpoint: what `state_dict` returns, `load_state_dict` takes back.

    `state_dict` returns a copy or live tensors that change only in the optimizer's step. It is the same on every rank,
    for one rank's is saved; `PerRank` saves each rank's. Entries that may differ for all that, as times do, are named
    in an attribute `may_differ_between_ranks`: the lowest rank's are saved, without a warning.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
