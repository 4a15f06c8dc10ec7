"""The objects that torchtitan of November 2024 gave to `dcp.save` and `dcp.load`: the same keys and kinds of values.

They are written from the layout, for a test that loads our folders as torchtitan did.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, field
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


@dataclass
class TrainState:
    """`train_state`: the step as a 32-bit tensor, and three lists that torch.save wrote into a `BytesIO` each."""

    step: int = 0
    global_avg_losses: list[float] = field(default_factory=list)
    global_max_losses: list[float] = field(default_factory=list)
    log_steps: list[int] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"step": torch.tensor(self.step, dtype=torch.int32)}
        for name in ("global_avg_losses", "global_max_losses", "log_steps"):
            state[name] = io.BytesIO()
            torch.save(getattr(self, name), state[name])
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"].item()
        for name in ("global_avg_losses", "global_max_losses", "log_steps"):
            state_dict[name].seek(0)
            setattr(self, name, torch.load(state_dict[name], weights_only=False))


@dataclass
class Loader:
    """`dataloader`: one pickle for each data-parallel rank; with an empty position the data begin from their start."""

    rank: int
    position: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{self.rank}": pickle.dumps(self.position)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = pickle.loads(state_dict[f"dp_rank_{self.rank}"])
