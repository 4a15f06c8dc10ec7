"""Warn of what a state changes and its `state_dict` leaves out, where that is proven.

Two things are: a metric of torchmetrics whose values are not persistent, as it lists them itself, and an object with an
empty state dict whose attributes are others than at the save before. A metric within the model is named only once it
has counted on from what a save found: one that was reset has lost nothing. Rank 0 looks, at saves; nothing of a device
is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from torchtitan_lite.log import logger
from torchtitan_lite.torch_private import version_of

_SHOWN = 4
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
                _named(names),
            )

    def _warn_of_empty(self, names: Sequence[str]) -> None:
        if names:
            self._has_named_empty = True
            logger.warning(
                "The state_dict of %s is empty, and training changes its attributes: no checkpoint has them, and a "
                "resumed run begins with the initial ones. Return them from state_dict, or leave it out of the states",
                _named(names),
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


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
