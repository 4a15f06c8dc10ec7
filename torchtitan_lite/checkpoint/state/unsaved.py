"""Warn of state that training changes and no checkpoint has, or that a `state_dict` leaves out where that is proven."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from torchtitan_lite.checkpoint.format.flattening import State, flat_tensors, is_plain
from torchtitan_lite.checkpoint.format.shards import local_of
from torchtitan_lite.checkpoint.state.names import EXTRA_STATE, SHOWN, storage_of
from torchtitan_lite.checkpoint.state.other_keys import saved_tensors
from torchtitan_lite.log import listed, logger
from torchtitan_lite.torch_private import is_set_by_torch, non_persistent_buffers, version_of

_SAMPLED = 1024
"""Elements of a buffer that are compared: tables of positions are long, and a change of one is a change of all."""
_SAMPLED_PARAMETER = 64
"""Elements of a parameter: an average into it changes all of them."""
_GENERATORS = frozenset({torch.Generator, random.Random, np.random.Generator, np.random.RandomState})


class UnsavedWatch:
    """Watches `modules` and `states`, by name, `optimizers`, and the parameters that checkpoints leave out."""

    def __init__(
        self,
        modules: Mapping[str, Sequence[nn.Module]],
        states: Mapping[str, Any],
        optimizers: Sequence[Any],
        left_out: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        self._modules = modules
        self._states = states
        self._optimizers = list(optimizers)
        self._left_out = left_out
        self._before: dict[str, Any] | None = None
        self._is_done = self._is_tried = self._has_named_attributes = False

    def look(self, state: State, rank: int) -> None:
        """Note what is unsaved of all but `state`, the full state of this `rank`. Raises as `check_attributes`.

        The first call on rank 0 logs what that finds; the second one a warning that names what has changed since, and
        so does each later one for attributes of states with an empty `state_dict`, until it has named some.
        """
        if not self._is_tried:
            check_attributes(self._modules, state, {f"model.{name}" for name in self._left_out()}, warns=rank == 0)
            self._is_tried = True
        if rank > 0:
            return
        attributes = {} if self._has_named_attributes else self._attributes(state)
        now = attributes if self._is_done else attributes | dict(self._samples(state))
        before, self._before = self._before, now
        if before is None:
            return
        self._is_done = True
        changed = [name for name, value in now.items() if name in before and value != before[name]]
        if changed:
            self._has_named_attributes |= not attributes.keys().isdisjoint(changed)
            logger.warning(
                "Training changes %s, which no checkpoint has: a resumed run begins with the initial value. If the "
                "run depends on it, register the buffer with persistent=True, give the generator, or the module of "
                "the frozen parameter (save_trained_only), as one of the states, or return it from state_dict",
                listed(changed, most=SHOWN),
            )

    def _samples(self, state: State) -> Iterator[tuple[str, Any]]:
        apart = {
            f"model.{name}{attribute}": each
            for name, tensor in self._left_out().items()
            for attribute, each in {"": tensor, **tensors_in_attributes(tensor)}.items()
        }
        for number, optimizer in enumerate(self._optimizers):
            own = _tensors_of_optimizer(f"optimizers[{number}]", optimizer)
            apart |= {name: own[name] for name in _not_in(state, own)}
        for name, each in apart.items():
            # A class of another library may not even have views; what it holds is in its attributes.
            local = local_of(each).detach()
            if is_plain(local) and local.layout is torch.strided and not local.is_meta and local.numel():
                yield name, _first_elements(local, _SAMPLED_PARAMETER)
        for of_state, parts in self._modules.items():
            for part in parts:
                for path, module in part.named_modules():
                    name = f"{of_state}.{path}" if path else of_state
                    yield from _of_buffers(name, module)
                    yield from _of_generators(name, module)
        for number, optimizer in enumerate(self._optimizers):
            yield from _of_generators(f"optimizers[{number}]", optimizer)

    def _attributes(self, state: State) -> dict[str, Any]:
        """Return what can be compared of the attributes of the states that give an empty dict."""
        empty = [(name, own) for name, own in self._states.items() if not state[name] and not _is_metric(own)]
        return {key: value for name, own in empty for key, value in _of_attributes(name, own)}


def _of_buffers(name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    names = non_persistent_buffers(module)
    buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False)) if names else {}
    for key in names:
        buffer = buffers.get(key)
        if type(buffer) is torch.Tensor and buffer.layout is torch.strided and not buffer.is_meta and buffer.numel():
            yield f"{name}.{key}", _first_elements(buffer, _SAMPLED)


def _first_elements(tensor: torch.Tensor, most: int) -> tuple[torch.dtype, torch.Size, list[int]]:
    """Return dtype, shape and the first elements, `most` at most: as bytes, because NaN is not equal to itself."""
    sample = tensor.detach().reshape(-1)[:most].resolve_conj().resolve_neg().cpu().contiguous()
    return tensor.dtype, tensor.shape, sample.view(torch.uint8).tolist()


def _of_generators(name: str, owner: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(owner, nn.Module) and type(owner).get_extra_state is not nn.Module.get_extra_state:
        return  # Its extra state may have them.
    if isinstance(owner, Optimizer) and type(owner).state_dict is not Optimizer.state_dict:
        return  # So may its state dict.
    # By the type itself: a look at all attributes of 700 modules is a part of a save.
    own = [(key, value) for key, value in getattr(owner, "__dict__", {}).items() if type(value) in _GENERATORS]
    for key, value in own:
        if isinstance(value, torch.Generator):
            yield f"{name}.{key}", value.get_state().tolist()
        elif isinstance(value, random.Random):
            yield f"{name}.{key}", value.getstate()
        elif isinstance(value, np.random.Generator):
            yield f"{name}.{key}", repr(value.bit_generator.state)
        elif isinstance(value, np.random.RandomState):
            yield f"{name}.{key}", repr(value.get_state(legacy=False))


def _tensors_of_optimizer(name: str, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return the tensors in attributes of an optimizer whose `state_dict` is torch's, which has none of them.

    Of another optimizer in an attribute, they are its parameters and their states: one that trains copies, or is run.
    """
    if not isinstance(optimizer, Optimizer) or type(optimizer).state_dict is not Optimizer.state_dict:
        return {}
    found: dict[str, Any] = {}
    for key, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            held = [each for group in value.param_groups for each in group["params"]]
            found |= {f"{name}.{key}.params[{number}]": each for number, each in enumerate(held)}
            for number, each in enumerate(held):
                found |= _entries(f"{name}.{key}.state[{number}]", value.state.get(each, {}))
        elif key not in ("state", "param_groups", "defaults"):
            found |= _entries(f"{name}.{key}", value)
    return {place: each for place, each in found.items() if isinstance(each, torch.Tensor)}


def _entries(name: str, value: Any) -> dict[str, Any]:
    """Return `value`, or what is in it, by name, if it is a list, a tuple or a dict."""
    if isinstance(value, dict):
        return {f"{name}[{key!r}]": each for key, each in value.items()}
    if isinstance(value, list | tuple):
        return {f"{name}[{number}]": each for number, each in enumerate(value)}
    return {name: value}


_MAX_PARTS = 1000
"""Values that are compared of one object."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class MetricsWatch:
    """Watches the metrics within `modules`, by name of their state: the model's, or one of `states`."""

    def __init__(self, modules: Mapping[str, Sequence[nn.Module]], states: Collection[str]) -> None:
        self._modules = modules
        self._states = states
        self._counting: list[tuple[str, Any, int]] = []
        """Metrics within modules that the last save found counting, each with its number of updates."""
        self._is_done = False

    def look(self) -> None:
        """Look at a save."""
        if not self._is_done:
            self._warn([name for name, metric in self._metrics() if name.partition(".")[0] in self._states])
            of_model = [(name, each) for name, each in self._metrics() if name.partition(".")[0] not in self._states]
            self._counting = [(name, each, num) for name, each in of_model if (num := each._update_count) > 0]

    def look_at_counts(self) -> None:
        """Look, at any step, whether metrics within the model have counted on since the last save."""
        counted = [name for name, metric, number in self._counting if metric._update_count > number]
        self._warn(counted)
        self._counting = [each for each in self._counting if each[1]._update_count == each[2]] if not counted else []

    def _metrics(self) -> Iterator[tuple[str, Any]]:
        for state, parts in self._modules.items():
            for part in parts:
                for path, module in part.named_modules():
                    if _is_metric(module) and not all(module._persistent.get(key) for key in module._defaults):
                        yield f"{state}.{path}" if path else state, module

    def _warn(self, names: Sequence[str]) -> None:
        if names:
            self._is_done = True
            logger.warning(
                "%s: a metric leaves values that are not persistent out of its state_dict, so no checkpoint has them, "
                "and a resumed run counts from the start. Call persistent(True) where the metric is made",
                listed(names, most=SHOWN),
            )


def _is_metric(value: Any) -> bool:
    """Return whether `value` is a metric of torchmetrics: with values by name, and which of them are persistent."""
    own = getattr(value, "__dict__", {})
    return (
        isinstance(own.get("_defaults"), dict)
        and isinstance(own.get("_persistent"), dict)
        and isinstance(getattr(value, "_update_count", None), int)
    )


def _of_attributes(name: str, state: Any) -> Iterator[tuple[str, Any]]:
    """Yield what can be compared of the attributes of `state`: plain values, containers of them, arrays and tensors.

    And under its own name which there are. Other objects, and parameters, may be saved elsewhere; so are the tensors of
    a module, whose mode is no state.
    """
    own = getattr(state, "__dict__", {}).items()
    if isinstance(state, nn.Module):
        own = [(key, value) for key, value in own if not key.startswith("_") and key != "training"]
    yield name, sorted(key for key, _ in own)
    for key, value in own:
        yield f"{name}.{key}", _watched_values(value)


def _watched_values(attribute: Any) -> list[Any]:
    values: list[Any] = []
    left = [attribute]
    while left and len(values) < _MAX_PARTS:
        value = left.pop()
        if isinstance(value, _PLAIN):
            values.append(repr(value)[:100])  # As text: NaN is not equal to itself.
        elif isinstance(value, Mapping):
            values.append(len(value))
            left += [*value.keys(), *value.values()][-_MAX_PARTS:]
        elif isinstance(value, list | tuple | deque):
            values.append(len(value))
            left += [*value][-_MAX_PARTS:]
        elif isinstance(value, np.ndarray):
            values.append((value.shape, value.reshape(-1)[:_MAX_PARTS].tolist()))
        elif type(value) is torch.Tensor and not value.requires_grad and not value.is_inference():
            values.append(version_of(value))
    return values


# What a parameter or a buffer is besides its elements, which are all that a checkpoint has of it.
#
# Tensors in its attributes, such as a scale that forward reads, are in a resumed run those that its model is built
# with. And a load copies into the tensor by `copy_` of its class, which may round. Both are named once, at the first
# save.


_OF_ONE_STEP = "main_grad"
"""Where Megatron, Apex and Transformer Engine sum the gradients of a step."""


def tensors_in_attributes(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors in attributes of `tensor`, and in lists, tuples and dicts there, by `.attribute`."""
    found: dict[str, torch.Tensor] = {}
    for owner in (tensor, local_of(tensor)):
        for name, value in getattr(owner, "__dict__", {}).items():
            if name == _OF_ONE_STEP or is_set_by_torch(owner, name):
                continue
            inner = _entries(f".{name}", value)
            found |= {key: each for key, each in inner.items() if isinstance(each, torch.Tensor)}
    return found


def check_attributes(
    modules: Mapping[str, Sequence[nn.Module]], state: State, left_out: Collection[str], *, warns: bool
) -> None:
    """Log what of the tensors of `modules`, by name of their state, no load of `state`, the full one, brings back.

    Those of `left_out`, by the same names, are in no checkpoint anyway. Logs only if it `warns`. Raises TypeError for
    lost attributes of a tensor of a class of its own.
    """
    named = _saved(modules, state, left_out)
    if lost := _lost_attributes([each for each in named if not is_plain(local_of(each[1]))], state):
        raise TypeError(
            f"no checkpoint would have {listed(lost, most=SHOWN)}, which are attributes of tensors of a subclass: a "
            "resumed run would have those that its model is built with. Give the class torch's __tensor_flatten__ and "
            "__tensor_unflatten__, register the tensors as buffers, or return them from get_extra_state"
        )
    if warns and (lost := _lost_attributes(named, state)):
        logger.warning(
            "No checkpoint has tensors in attributes of parameters and buffers: %s. A resumed run has those with which "
            "its model is built. If they may differ, register them as buffers, or return them from get_extra_state",
            listed(lost, most=SHOWN),
        )
    rounded = [f"{name} ({type(local_of(each)).__name__})" for name, each in named if warns and _is_rounded(each)]
    if rounded:
        logger.warning(
            "A load does not bring back the values of %s: it copies into the tensor, and copy_ of its class changes "
            "what it is given. Have copy_ keep the values, or keep to those that it keeps",
            listed(rounded, most=SHOWN),
        )


def _saved(
    modules: Mapping[str, Sequence[nn.Module]], state: State, left_out: Collection[str]
) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of `modules` that are in `state` as they are, not as extra state or by their parts."""
    return [
        (f"{of_state}.{name}", tensor)
        for of_state, parts in modules.items()
        for part in parts
        for name, tensor in saved_tensors(part).items()
        if f"{of_state}.{name}" not in left_out and _extra_state_of(name) not in state[of_state]
        if storage_of(tensor)  # Else it is a wrapper: its attributes are saved, or the save refuses it.
    ]


def _lost_attributes(named: Sequence[tuple[str, torch.Tensor]], state: State) -> list[str]:
    attributes = {
        f"{name}{place}": each for name, tensor in named for place, each in tensors_in_attributes(tensor).items()
    }
    return _not_in(state, attributes)


def _extra_state_of(name: str) -> str:
    """Return the key of the extra state of a tensor's module, which may have what the tensor has in attributes."""
    return ".".join([*name.split(".")[:-1], EXTRA_STATE])


def _not_in(state: State, attributes: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of those `attributes` that are neither in `state` nor share memory with a tensor in it."""
    if not attributes:
        return []
    saved = flat_tensors(state)
    memory = {storage_of(each) for each in saved.values()} - {0}
    return [
        name
        for name, each in attributes.items()
        if name not in saved and storage_of(each) not in memory and each.numel() and not each.is_meta
    ]


def _is_rounded(tensor: torch.Tensor) -> bool:
    """Return whether a copy of `tensor` has other values than it, because its class copies in its own way."""
    local = local_of(tensor)
    if is_plain(local):
        return False
    # A class of another library may support nothing of this.
    with torch.no_grad(), suppress(Exception):
        probe = local.detach().clone().as_subclass(type(local))
        vars(probe).update(vars(local))
        probe.copy_(local.detach())
        return not torch.equal(_bytes(probe), _bytes(local))
    return False


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(torch.Tensor).contiguous().reshape(-1).view(torch.uint8)
