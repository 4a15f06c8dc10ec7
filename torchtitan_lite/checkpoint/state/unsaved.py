"""Warn of state that training changes and no checkpoint has, or that a `state_dict` leaves out where that is proven."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.format.kinds import is_plain
from torchtitan_lite.checkpoint.format.shards import local_of
from torchtitan_lite.checkpoint.state.attributes import tensors_in_attributes, warn_of_attributes
from torchtitan_lite.checkpoint.state.names import listed
from torchtitan_lite.log import logger
from torchtitan_lite.torch_private import non_persistent_buffers, version_of

_SAMPLED = 1024
"""Elements of a buffer that are compared: tables of positions are long, and a change of one is a change of all."""
_SAMPLED_PARAMETER = 64
"""Elements of a parameter: an average into it changes all of them."""
_GENERATORS = frozenset({torch.Generator, random.Random, np.random.Generator, np.random.RandomState})


def _no_parameters() -> Mapping[str, torch.Tensor]:
    return {}


class UnsavedWatch:
    """Watches `modules`, by name of their state, `optimizers`, and the parameters that checkpoints leave out."""

    def __init__(
        self,
        modules: Mapping[str, Sequence[nn.Module]],
        optimizers: Sequence[Any],
        left_out: Callable[[], Mapping[str, torch.Tensor]] = _no_parameters,
    ) -> None:
        self._modules = modules
        self._optimizers = list(optimizers)
        self._left_out = left_out
        self._before: dict[str, Any] | None = None
        self._is_done = False

    def look(self, state: State) -> None:
        """Note what is unsaved of all but `state`, the full state.

        The first call logs what `warn_of_attributes` finds; the second one a warning that names what has changed since.
        """
        if self._is_done:
            return
        now = dict(self._samples())
        if self._before is None:
            warn_of_attributes(self._modules, state, {f"model.{name}" for name in self._left_out()})
            self._before, self._is_done = now, not now
            return
        self._is_done = True
        changed = [name for name, value in now.items() if name in self._before and value != self._before[name]]
        if changed:
            logger.warning(
                "Training changes %s, which no checkpoint has: a resumed run begins with the initial value. If the "
                "run depends on it, register the buffer with persistent=True, or give the generator, or the module of "
                "the frozen parameter (save_trained_only), as one of the states",
                listed(changed),
            )

    def _samples(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self._left_out().items():
            for attribute, each in {"": tensor, **tensors_in_attributes(tensor)}.items():
                # A class of another library may not even have views; what it holds is in its attributes.
                local = local_of(each).detach()
                if is_plain(local) and local.layout is torch.strided and not local.is_meta and local.numel():
                    yield f"model.{name}{attribute}", _sample(local, _SAMPLED_PARAMETER)
        for state, parts in self._modules.items():
            for part in parts:
                for path, module in part.named_modules():
                    name = f"{state}.{path}" if path else state
                    yield from _of_buffers(name, module)
                    yield from _of_generators(name, module)
        for number, optimizer in enumerate(self._optimizers):
            yield from _of_generators(f"optimizers[{number}]", optimizer)


def _of_buffers(name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    names = non_persistent_buffers(module)
    buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False)) if names else {}
    for key in names:
        buffer = buffers.get(key)
        if type(buffer) is torch.Tensor and buffer.layout is torch.strided and not buffer.is_meta and buffer.numel():
            yield f"{name}.{key}", _sample(buffer, _SAMPLED)


def _sample(tensor: torch.Tensor, most: int) -> tuple[torch.dtype, torch.Size, list[int]]:
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
            legacy: Any = value.get_state()
            yield f"{name}.{key}", (legacy[1].tolist(), legacy[2:])


_MAX_PARTS = 1000
"""Values that are compared of one object."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class ForgottenWatch:
    """Watches `states`, and the metrics within `modules`, both by name of their state."""

    def __init__(self, states: Mapping[str, Any], modules: Mapping[str, Sequence[nn.Module]]) -> None:
        self._states = states
        self._modules = modules
        self._attributes: dict[str, dict[str, list[Any]]] = {}
        self._counting: list[tuple[str, Any, int]] = []
        """Metrics within modules that the last save found counting, each with its number of updates."""
        self._has_named_metrics = self._has_named_empty = False

    def look(self, empty: Collection[str]) -> None:
        """Look at a save, in which the state dicts of `empty`, some of the states, have no entry."""
        if not self._has_named_metrics:
            self._warn_of_metrics([name for name, metric in self._metrics() if name.partition(".")[0] in self._states])
            of_model = [(name, each) for name, each in self._metrics() if name.partition(".")[0] not in self._states]
            self._counting = [(name, each, num) for name, each in of_model if (num := each._update_count) > 0]
        if not self._has_named_empty:
            before, self._attributes = self._attributes, {name: _attributes(self._states[name]) for name in empty}
            changed = [name for name, now in self._attributes.items() if name in before and before[name] != now]
            self._warn_of_empty([name for name in changed if not _is_metric(self._states[name])])

    def look_at_counts(self) -> None:
        """Look, at any step, whether metrics within the model have counted on since the last save."""
        counted = [name for name, metric, number in self._counting if metric._update_count > number]
        self._warn_of_metrics(counted)
        self._counting = [each for each in self._counting if each[1]._update_count == each[2]] if not counted else []

    def _metrics(self) -> Iterator[tuple[str, Any]]:
        for state, parts in self._modules.items():
            for part in parts:
                for path, module in part.named_modules():
                    if _is_metric(module) and not all(module._persistent.get(key) for key in module._defaults):
                        yield f"{state}.{path}" if path else state, module

    def _warn_of_metrics(self, names: Sequence[str]) -> None:
        if names:
            self._has_named_metrics = True
            logger.warning(
                "%s: a metric leaves values that are not persistent out of its state_dict, so no checkpoint has them, "
                "and a resumed run counts from the start. Call persistent(True) where the metric is made",
                listed(names),
            )

    def _warn_of_empty(self, names: Sequence[str]) -> None:
        if names:
            self._has_named_empty = True
            logger.warning(
                "The state_dict of %s is empty, and training changes its attributes: no checkpoint has them, and a "
                "resumed run begins with the initial ones. Return them from state_dict, or leave it out of the states",
                listed(names),
            )


def _is_metric(value: Any) -> bool:
    """Return whether `value` is a metric of torchmetrics: with values by name, and which of them are persistent."""
    own = getattr(value, "__dict__", {})
    return (
        isinstance(own.get("_defaults"), dict)
        and isinstance(own.get("_persistent"), dict)
        and isinstance(getattr(value, "_update_count", None), int)
    )


def _attributes(state: Any) -> dict[str, list[Any]]:
    """Return what can be compared of the attributes of `state`: plain values, containers of them, arrays and tensors.

    Other objects, and parameters, may be saved elsewhere; so are the tensors of a module, whose mode is no state.
    """
    own = getattr(state, "__dict__", {}).items()
    if isinstance(state, nn.Module):
        own = [(key, value) for key, value in own if not key.startswith("_") and key != "training"]
    return {key: _values(value) for key, value in own}


def _values(attribute: Any) -> list[Any]:
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
