"""Every optimizer of `torch.optim`, with arguments for it, and a model that it can train.

An optimizer without a recipe fails `test_every_optimizer_of_torch_has_a_recipe` by name, so that a later
torch is seen to have it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Regression(nn.Module):
    """Two layers, one more that only the later steps use, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 2)
        self.late = nn.Linear(6, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: Tensor, *, late: bool = False) -> Tensor:
        y = torch.tanh(self.first(x))
        z: Tensor = self.frozen(self.second(y) + (self.late(y) if late else 0.0))
        return z


class Table(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 3, sparse=True)
        self.late = nn.Embedding(10, 3, sparse=True)

    def forward(self, x: Tensor, *, late: bool = False) -> Tensor:
        rows = (x[:, 0].abs() * 3).long().clamp(max=9)
        y: Tensor = self.table(rows) + (self.late(rows) if late else 0.0)
        return y


class Matrices(nn.Module):
    """Only parameters of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6, bias=False)
        self.late = nn.Linear(4, 6, bias=False)

    def forward(self, x: Tensor, *, late: bool = False) -> Tensor:
        y: Tensor = self.first(x) + (self.late(x) if late else 0.0)
        return y


@dataclass(frozen=True)
class Recipe:
    """The class and arguments of one optimizer."""

    kind: type[Optimizer]
    arguments: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = Regression

    def __str__(self) -> str:
        return "-".join([self.kind.__name__, *(f"{key}={value}" for key, value in self.arguments.items())])

    def build(self, model: nn.Module) -> Optimizer:
        """Return the optimizer over all of `model`."""
        return self.kind(model.parameters(), **self.arguments)


RECIPES = (
    Recipe(torch.optim.Adadelta),
    Recipe(torch.optim.Adagrad, {"lr": 0.1}),
    Recipe(torch.optim.Adagrad, {"initial_accumulator_value": 0.5}),
    Recipe(torch.optim.Adam),
    Recipe(torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    Recipe(torch.optim.AdamW),
    Recipe(torch.optim.AdamW, {"foreach": True}),
    Recipe(torch.optim.AdamW, {"fused": True}),
    Recipe(torch.optim.Adamax),
    Recipe(torch.optim.ASGD),
    Recipe(torch.optim.LBFGS, {"lr": 0.1, "max_iter": 3}),
    Recipe(torch.optim.NAdam),
    Recipe(torch.optim.RAdam),
    Recipe(torch.optim.RMSprop),
    Recipe(torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    Recipe(torch.optim.Rprop),
    Recipe(torch.optim.SGD, {"lr": 0.1}),
    Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    Recipe(torch.optim.SparseAdam, {}, Table),
)


def recipes() -> list[Recipe]:
    """Return the recipes for what this version of torch has."""
    later = [("Adafactor", Regression), ("Muon", Matrices)]
    made = [Recipe(getattr(torch.optim, name), {}, model) for name, model in later if hasattr(torch.optim, name)]
    return [*RECIPES, *made]


def optimizers_of_torch() -> list[type[Optimizer]]:
    """Return every concrete class of `torch.optim`."""
    members = [member for _, member in inspect.getmembers(torch.optim, inspect.isclass)]
    return [each for each in members if issubclass(each, Optimizer) and each is not Optimizer]


def train_step(model: nn.Module, optimizer: Optimizer, step: int, *, late: bool = False) -> float:
    """Take step number `step` on its own batch; return the loss before it."""
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))

    def loss() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = model(batch, late=late).square().mean()
        value.backward()
        return value

    return float(torch.as_tensor(optimizer.step(loss)).detach())  # type: ignore[arg-type]  # torch says float for both


def state_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return a copy of each parameter's state, in order; empty for a parameter without state."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [_copied(optimizer.state.get(parameter, {})) for parameter in parameters]


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value
