"""The objects that torchtitan of November 2024 gave to `dcp.save` and `dcp.load`: the same keys and kinds of values.

They are written from the layout, for a test that loads our folders as torchtitan did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass
class Model:
    """`model`: its tensors under their names."""

    of: nn.Module

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.of)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self.of, state_dict, options=StateDictOptions(strict=False))


@dataclass
class Optimizer:
    """`optimizer`: flat, by the names of parameters; `state_dict` creates state that does not exist yet."""

    model: nn.Module
    of: torch.optim.Optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.of, options=_FLAT)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.of, state_dict, options=_FLAT)
