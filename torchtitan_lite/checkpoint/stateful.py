"""A run's objects as `Stateful`s: the model, the optimizers and the LR schedulers, and the protocol itself."""

from __future__ import annotations

from typing import Any, Protocol

from torchtitan_lite.checkpoint.state.model import ModelWrapper
from torchtitan_lite.checkpoint.state.optimizer import OptimizerWrapper
from torchtitan_lite.checkpoint.state.schedulers import LRSchedulerWrapper

__all__ = ["LRSchedulerWrapper", "ModelWrapper", "OptimizerWrapper", "Stateful"]


class Stateful(Protocol):
    """Anything that can be in a checkpoint: what `state_dict` returns, `load_state_dict` takes back.

    `state_dict` returns a copy or live tensors that change only in the optimizer's step.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
