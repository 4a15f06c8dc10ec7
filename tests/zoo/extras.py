"""State that a run has in addition to its model, one optimizer and one schedule."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from torchtitan_lite.checkpoint.state.per_rank import PerRank
from torchtitan_lite.checkpoint.state.stateful import Stateful

TWO_GROUPS, TWO_OPTIMIZERS, SCALER = "two parameter groups", "two optimizers and schedulers", "GradScaler"
NONE = "none"


class Owner(Protocol):
    """What the states need of their run."""

    rank: int
    module: nn.Module
    is_pipeline: bool
    optimizers: list[Optimizer]
    scaler: Any
    after_step: list[Callable[[], Any]]


class Ema:
    """An average of the parameters that a hook updates after each step of the optimizer."""

    def __init__(self, run: Owner) -> None:
        self._run = run
        self._shadows = [parameter.detach().clone() for parameter in run.module.parameters()]
        self.calls = 0
        run.optimizers[-1].register_step_post_hook(self._update)

    def _update(self, *_: Any) -> None:
        self.calls += 1
        with torch.no_grad():
            for shadow, parameter in zip(self._shadows, self._run.module.parameters(), strict=True):
                shadow.mul_(0.9).add_(parameter.detach() * 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "shadows": dict(enumerate(self._shadows))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls = state_dict["calls"]
        for at, shadow in enumerate(self._shadows):
            shadow.copy_(state_dict["shadows"][at])


class OddKeys:
    """A state with keys and containers that flat files lose. It changes with every step."""

    def __init__(self, run: Owner) -> None:
        self.state: dict[Any, Any] = {
            "a.b": {"c": {}, "": [], "d": ()},
            "a": {"b.c": 1, "ü/\n": None},
            0: "int",
            -1: "negative",
            1.5: "float",
            None: "none",
            (1, ("x", 2.5)): torch.arange(3),
            b"bytes": b"\x00\xff",
            "counter": Counter({3: 2, "x": 1}),
            "ordered": OrderedDict([("z", 1), ("a", [{}, [], [[]]])]),
            "set": {1, "two", (3,)},
            "size": torch.Size([2, 3]),
            "dtype": torch.bfloat16,
            "numbers": [float("inf"), float("nan"), -0.0, 1 << 80, True, 1 + 2j],
            "long": "x" * 70000,
            "scalar": torch.tensor(2.5),
            "empty": torch.zeros(0, 2),
            "steps": 0,
        }
        run.after_step.append(self._count)

    def _count(self) -> None:
        self.state["steps"] += 1
        self.state["counter"][self.state["steps"]] += 1
        self.state[0] = f"int {self.state['steps']}"

    def state_dict(self) -> dict[Any, Any]:
        return dict(self.state) | {"counter": self.state["counter"].copy()}

    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        self.state = dict(state_dict)


class OfThisRank:
    """Numbers that differ between ranks."""

    def __init__(self, run: Owner) -> None:
        self.values = [run.rank]
        run.after_step.append(lambda: self.values.append(self.values[-1] + 1 + run.rank))

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.values)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values[:] = state_dict["values"]


class Scaler:
    """torch's GradScaler, as one of the further states."""

    def __init__(self, run: Owner) -> None:
        self._scaler = run.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state_dict)


def _ema(run: Owner) -> dict[str, Stateful]:
    ema = Ema(run)
    # FSDP1's parameters are flat shards, which differ between ranks.
    is_flat = any(isinstance(each, FullyShardedDataParallel) for each in run.module.modules())
    return {"ema": PerRank(ema) if is_flat or run.is_pipeline else ema}


def _averaged(run: Owner) -> dict[str, Any]:
    averaged = AveragedModel(run.module)
    run.after_step.append(lambda: averaged.update_parameters(run.module))
    return {"swa": averaged}


EXTRAS: dict[str, Callable[[Owner], dict[str, Any]]] = {
    NONE: lambda run: {},
    "EMA in a step hook": _ema,
    "a state with odd keys": lambda run: {"odd": OddKeys(run)},
    "a state of each rank": lambda run: {"mine": PerRank(OfThisRank(run))},
    "swa_utils.AveragedModel": _averaged,
    SCALER: lambda run: {"scaler": Scaler(run)},
    TWO_GROUPS: lambda run: {},
    TWO_OPTIMIZERS: lambda run: {},
}


def is_sparse(module: nn.Module) -> bool:
    """Return whether `module` has sparse gradients."""
    return isinstance(module, nn.Embedding) and module.sparse


def states_of(states: dict[str, Any]) -> dict[str, Any]:
    """Return the state dicts of the extra states."""
    return {name: state.state_dict() for name, state in states.items()}
