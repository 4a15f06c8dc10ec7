"""What a loop measured at a step, as its checkpoint records it: for `checkpoint.keep_best_k`, and for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import SupportsFloat

import torch

from torchtitan_lite.errors import ConfigError

Metrics = Mapping[str, SupportsFloat]
"""By name, numbers or tensors of one element."""


def check_metrics(metrics: Metrics) -> None:
    """Raise ConfigError unless each metric has a name and is a number or a tensor of one element; reads no tensor."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"metrics: expected numbers by name, such as {{'loss': 0.5}}, found {type(metrics).__name__}."
        )
    for name, value in metrics.items():
        if not isinstance(name, str) or not name or not name.isprintable():
            raise ConfigError(f"metrics: expected a name for each metric, found {name!r:.100}.")
        if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
            raise ConfigError(f"metrics[{name!r:.100}]: expected a number, found {type(value).__name__}.")
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            shape = list(value.shape)
            raise ConfigError(f"metrics[{name!r:.100}]: expected a tensor of one element, found the shape {shape}.")


def finite(metrics: Metrics) -> dict[str, float]:
    """Return the metrics as plain numbers, without those that are NaN or infinite: JSON has no such numbers."""
    # Of a tensor with a graph, such as a loss, torch warns against float().
    plain = {name: each.detach() if isinstance(each, torch.Tensor) else each for name, each in metrics.items()}
    numbers = {name: float(value) for name, value in plain.items()}
    return {name: number for name, number in numbers.items() if math.isfinite(number)}
