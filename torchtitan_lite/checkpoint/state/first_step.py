"""The state that an optimizer's own first step makes, found without a trace.

Where a checkpoint has states of a class of another library and a new optimizer has no state yet, only the optimizer
knows how to make a tensor of that class. So it steps once, with gradients of zero and a learning rate of 0, and all
that this changes is put back: parameters, gradients, settings, attributes, random generators; no hook runs. It takes
the memory of a copy of the parameters for the time of the step. Any rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from torchtitan_lite.checkpoint.format.flattening import wide_float
from torchtitan_lite.checkpoint.format.shards import local_of
from torchtitan_lite.checkpoint.state.rng import RngState
from torchtitan_lite.checkpoint.state.subclasses import class_name, inner_tensors, is_made_of_others
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.torch_private import without_step_hooks

States = Mapping[torch.Tensor, Mapping[Any, Any]]


def first_states(optimizer: Optimizer) -> States:
    """Return the state that the first step of `optimizer` makes, by parameter; `optimizer` is afterwards as it was.

    Raises ConfigError if the step fails, or changes a parameter.
    """
    with _as_it_was(optimizer), without_step_hooks(optimizer):
        made: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        optimizer.state = made
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = group["lr"] * 0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        memory = [part for group in optimizer.param_groups for each in group["params"] for part in _memory(each)]
        before = [part.clone() for part in memory]
        try:
            # Not the method of the instance: a scheduler counts the calls of that.
            type(optimizer).step(optimizer)
        except Exception as error:
            raise _no_first_step(optimizer, f"its step() raises {type(error).__name__}: {error}") from error
        finally:
            is_changed = False
            for part, kept in zip(memory, before, strict=True):
                now, then = wide_float(part), wide_float(kept)
                is_changed = is_changed or not torch.allclose(now, then, rtol=0.0, atol=0.0, equal_nan=True)
                part.copy_(kept)
        if is_changed:
            raise _no_first_step(optimizer, "it changes parameters, although the learning rate and gradients are 0")
    return made


def states_of_others(optimizer: Any) -> Iterator[tuple[torch.Tensor, Mapping[Any, Any]]]:
    """Yield the parameters of an optimizer of any library whose state has tensors that are made of others, and that."""
    states = getattr(optimizer, "state", None)
    held = {id(each) for group in getattr(optimizer, "param_groups", ()) for each in group["params"]}
    for parameter, state in states.items() if isinstance(states, Mapping) else ():
        if id(parameter) in held and isinstance(state, Mapping) and any(map(is_made_of_others, state.values())):
            yield parameter, state


def refuse_without_first_step(optimizer: Optimizer) -> None:
    """Raise ConfigError if a new `optimizer` could not make the states that this one has, of classes of others.

    Tried with a copy of one parameter for each class; the optimizer itself does not step.
    """
    tried: set[str] = set()
    for parameter, state in states_of_others(optimizer):
        kinds = {class_name(value) for value in state.values() if is_made_of_others(value)}
        if kinds <= tried:
            continue
        tried |= kinds
        probe = _with_one(optimizer, parameter)
        made = next(iter(first_states(probe).values()), {})
        for key, value in state.items():
            if is_made_of_others(value) and class_name(made.get(key)) != class_name(value):
                raise _no_first_step(optimizer, f"it makes no {class_name(value)} for {key!r}")


def _no_first_step(optimizer: Optimizer, why: str) -> ConfigError:
    return ConfigError(
        f"{type(optimizer).__name__} has states of a tensor subclass, which a later start could not make: a first "
        f"step with gradients of 0 and a learning rate of 0 should make them, and {why}. Use an optimizer whose "
        "step() makes its states without a closure, or return plain tensors from its state_dict."
    )


def _with_one(optimizer: Optimizer, parameter: torch.Tensor) -> Optimizer:
    """Return an optimizer like this one, without state, for a copy of `parameter` alone."""
    probe: Optimizer = object.__new__(type(optimizer))
    vars(probe).update(vars(optimizer))
    copy = torch.nn.Parameter(parameter.detach().clone())
    group = next(each for each in optimizer.param_groups if any(held is parameter for held in each["params"]))
    probe.param_groups = [{**group, "params": [copy]}]
    return probe


@contextmanager
def _as_it_was(optimizer: Optimizer) -> Iterator[None]:
    own = dict(vars(optimizer))
    groups = [(group, dict(group)) for group in optimizer.param_groups]
    gradients = [(each, each.grad) for group in optimizer.param_groups for each in group["params"]]
    generators = RngState().state_dict()
    try:
        yield
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(own)
        for group, settings in groups:
            group.clear()
            group.update(settings)
        for each, gradient in gradients:
            each.grad = gradient
        RngState().load_state_dict(generators)


def _memory(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return the memory that this rank has of `parameter`."""
    if is_made_of_others(parameter):
        return [local_of(each) for each in inner_tensors("a parameter", parameter).values()]
    return [local_of(parameter).detach()]
