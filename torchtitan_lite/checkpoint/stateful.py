"""A run's objects as one state dict with names that do not depend on how the run is set up.

Names are those of the plain model: no prefix of activation checkpointing, compilation or FSDP, and
no index of an optimizer's parameter. A rank may hold several model parts (pipeline stages); their
names are disjoint, and a name that two parts share is refused, because one of them would be lost.
Tensors are the live ones, so loading into them is loading the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchtitan_lite.checkpoint.key_report import compare_tensors
from torchtitan_lite.checkpoint.kinds import refuse_expanded
from torchtitan_lite.errors import CheckpointMismatch

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
STRICT = StateDictOptions(strict=True)


class Stateful(Protocol):
    """Anything that can be in a checkpoint: what `state_dict` returns, `load_state_dict` takes back.

    `state_dict` returns a copy or live tensors that change only in the optimizer's step.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class ModelWrapper:
    """All model parts of this rank as one `Stateful`: FQN to live tensor."""

    def __init__(self, model_parts: nn.Module | Sequence[nn.Module]) -> None:
        self._parts = [model_parts] if isinstance(model_parts, nn.Module) else list(model_parts)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Raises TypeError for a tensor that nothing can be loaded into."""
        state = _merge_disjoint([get_model_state_dict(part) for part in self._parts])
        refuse_expanded(state)
        return state

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Takes exactly the keys that `state_dict` has; raises `CheckpointMismatch` before anything is changed."""
        report = compare_tensors(expected=self.state_dict(), found=state_dict)
        if report:
            raise CheckpointMismatch("the model's state dict", str(report))
        for part in self._parts:
            own = get_model_state_dict(part)
            set_model_state_dict(part, {fqn: state_dict[fqn] for fqn in own}, options=STRICT)


class OptimizerWrapper:
    """The optimizers of all model parts as one `Stateful`, its keys flat.

    They are `state.<fqn>.<name>` and `param_groups.<fqn>.<key>`: by FQN and not by index, so that a parameter
    finds its state whatever part, rank or group it belongs to. A parameter that never stepped has the state that
    its first step would begin with.
    """

    def __init__(self, model_parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._pairs = list(zip(model_parts, optimizers, strict=True))

    def state_dict(self) -> dict[str, Any]:
        self._make_states()
        return _merge_disjoint([get_optimizer_state_dict(part, opt, options=FLAT) for part, opt in self._pairs])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._make_states()
        for part, optimizer in self._pairs:
            set_optimizer_state_dict(part, optimizer, state_dict, options=FLAT)

    def has_state(self) -> bool:
        """Whether every trained parameter has stepped, or was loaded: `state_dict` then makes nothing."""
        return all(
            optimizer.state.get(parameter)
            for _, optimizer in self._pairs
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        )

    def _make_states(self) -> None:
        for _, optimizer in self._pairs:
            _make_state(optimizer)


class LRSchedulerWrapper:
    """The schedulers of all model parts as one `Stateful`: they step together, so one state is all of them."""

    def __init__(self, lr_schedulers: Sequence[LRScheduler]) -> None:
        self._schedulers = list(lr_schedulers)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._schedulers[0].state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for scheduler in self._schedulers:
            scheduler.load_state_dict(dict(state_dict))


def _make_state(optimizer: Optimizer) -> None:
    """Every trained parameter has state; values, gradients and step counts are as they were.

    An optimizer makes state in a step, so one is taken, of length 0, over the parameters that have none. torch's own
    way counts that step, and leaves out parameters that had no gradient yet, and all of them where one has.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    stateless = [parameter for parameter in trained if not optimizer.state.get(parameter)]
    if not stateless:
        return
    gradients = [parameter.grad for parameter in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    decays = [group.get("weight_decay") for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = None
    for parameter in stateless:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        if "weight_decay" in group:
            group["weight_decay"] = 0.0  # Adam and SGD add it to the gradient, and so to their moments.
    optimizer.step()
    for group, rate, decay in zip(optimizer.param_groups, rates, decays, strict=True):
        group["lr"] = rate
        if decay is not None:
            group["weight_decay"] = decay
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for parameter in stateless:
        if isinstance(step := optimizer.state[parameter].get("step"), torch.Tensor):
            step.zero_()


def _merge_disjoint(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        shared = sorted(merged.keys() & part.keys())
        if shared:
            raise ValueError(
                f"two model parts of this rank share the name {shared[0]!r}"
                + (f" and {len(shared) - 1} more" if len(shared) > 1 else "")
                + "; one of them would be lost in a checkpoint. Give each part its own layers."
            )
        merged.update(part)
    return merged
