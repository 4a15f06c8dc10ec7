"""The progress of a run: step, tokens, time, logged losses; and what its weights do not show of its model.

In a checkpoint all but the last is tensors, never pickles, so that nothing must be unpickled to know the step.
The loss history has one entry a logged step; in a checkpoint it is padded to a power of two, so that its
shape, and with it the plan of a save, rarely changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, SupportsFloat, TypeVar

import torch

from torchtitan_lite.checkpoint.format.contents import CLOCKS
from torchtitan_lite.errors import ConfigError

T = TypeVar("T")

_NO_STEP = -1
_MIN_LENGTH = 1024


@dataclass
class TrainState:
    """The progress of a run as a `Stateful`, the same on every rank but for its clocks."""

    may_differ_between_ranks: ClassVar[tuple[str, ...]] = CLOCKS
    """Each rank reads its own clock."""
    step: int = 0
    """Optimizer steps done; the loop counts them."""
    n_tokens_seen: int = 0
    """Tokens that all ranks together have trained on."""
    skipped_steps: int = 0
    """Steps that the gradient scaler skipped."""
    run_seconds: float = 0.0
    """Wall-clock time of the run up to this step, summed over its starts."""
    productive_seconds: float = 0.0
    """The part of `run_seconds` spent in training steps."""
    log_steps: list[int] = field(default_factory=list)
    """The logged steps, ascending; the two lists of losses have one entry for each."""
    global_avg_losses: list[float] = field(default_factory=list)
    """Mean loss over all ranks at each logged step."""
    global_max_losses: list[float] = field(default_factory=list)
    """Highest loss of any rank at each logged step."""
    recent_losses: list[float] = field(default_factory=list)
    """Losses of the last steps, over which a spike of the loss is found; empty without that rule."""
    loss_window: int = 0
    """How many of them a checkpoint has room for; 0: it has none."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the model, which its weights need not show: numbers by name."""
    records_model: bool = False
    """Whether a checkpoint has `model`: its settings come from a file, which may change."""

    def record_loss(self, average: float, maximum: float) -> None:
        """Append the losses of the current step to the history."""
        self.log_steps.append(self.step)
        self.global_avg_losses.append(average)
        self.global_max_losses.append(maximum)

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ConfigError if the run of `state_dict` trained another `model`. Changes nothing."""
        before, now = state_dict.get("model") or {}, self.model
        if not before or not now:
            return
        names = dict.fromkeys((*before, *now))
        changed = [
            f"{name} {before.get(name)} -> {now.get(name)}" for name in names if before.get(name) != now.get(name)
        ]
        if changed:
            raise ConfigError(
                "model.config_path: the file describes another model than that of the checkpoint: "
                f"{', '.join(changed)}. "
                "Put its old values back, or start a new run in another job.dump_folder, from these weights with "
                "--checkpoint.initial_load_path."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return all fields as new tensors on the CPU; `model` and the recent losses only if they are recorded."""
        recorded: dict[str, Any] = {"model": dict(self.model)} if self.records_model else {}
        if self.loss_window:
            missing = [math.nan] * (self.loss_window - len(self.recent_losses))
            losses = [*missing, *self.recent_losses[-self.loss_window :]]
            recorded["recent_losses"] = torch.tensor(losses, dtype=torch.float64, device="cpu")
        return recorded | {
            "step": torch.tensor(self.step, dtype=torch.int64, device="cpu"),
            "n_tokens_seen": torch.tensor(self.n_tokens_seen, dtype=torch.int64, device="cpu"),
            "skipped_steps": torch.tensor(self.skipped_steps, dtype=torch.int64, device="cpu"),
            "run_seconds": torch.tensor(self.run_seconds, dtype=torch.float64, device="cpu"),
            "productive_seconds": torch.tensor(self.productive_seconds, dtype=torch.float64, device="cpu"),
            "log_steps": torch.tensor(_padded(self.log_steps, _NO_STEP), dtype=torch.int64, device="cpu"),
            "global_avg_losses": torch.tensor(_padded(self.global_avg_losses, 0.0), dtype=torch.float64, device="cpu"),
            "global_max_losses": torch.tensor(_padded(self.global_max_losses, 0.0), dtype=torch.float64, device="cpu"),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over all but the model's settings. Raises as `check_state` does."""
        self.check_state(state_dict)
        self.step = int(state_dict["step"])
        self.n_tokens_seen = int(state_dict["n_tokens_seen"])
        self.skipped_steps = int(state_dict["skipped_steps"])
        recent = state_dict["recent_losses"].tolist() if "recent_losses" in state_dict else []
        self.recent_losses = [loss for loss in recent if not math.isnan(loss)]
        self.run_seconds = float(state_dict.get("run_seconds", 0.0))
        self.productive_seconds = float(state_dict.get("productive_seconds", 0.0))
        steps = state_dict["log_steps"].tolist()
        count = steps.index(_NO_STEP) if _NO_STEP in steps else len(steps)
        self.log_steps = steps[:count]
        self.global_avg_losses = state_dict["global_avg_losses"].tolist()[:count]
        self.global_max_losses = state_dict["global_max_losses"].tolist()[:count]


def _padded(values: list[T], filler: T) -> list[T]:
    """Return `values`, padded with `filler` to a length that is a power of two and at least `_MIN_LENGTH`."""
    length = max(_MIN_LENGTH, 1 << (len(values) - 1).bit_length()) if values else _MIN_LENGTH
    return values + [filler] * (length - len(values))


# What a loop measured at a step, as its checkpoint records it: for `checkpoint.keep_best_k`, and for people.


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
