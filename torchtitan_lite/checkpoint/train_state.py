"""How far the run has come: step, tokens, time, logged losses.

All of it is tensors in a checkpoint, never pickles, so that nothing has to be unpickled to know
the step. The loss history holds one entry a logged step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class TrainState:
    """A `Stateful`. `n_tokens_seen` counts over all ranks."""

    step: int = 0
    n_tokens_seen: int = 0
    skipped_steps: int = 0
    run_seconds: float = 0.0
    """Wall-clock time of the run up to this step, over all of its starts."""
    productive_seconds: float = 0.0
    """Of these, the time spent in training steps."""
    log_steps: list[int] = field(default_factory=list)
    global_avg_losses: list[float] = field(default_factory=list)
    global_max_losses: list[float] = field(default_factory=list)

    def record_loss(self, average: float, maximum: float) -> None:
        """Adds the losses of the present step to the history."""
        self.log_steps.append(self.step)
        self.global_avg_losses.append(average)
        self.global_max_losses.append(maximum)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": torch.tensor(self.step, dtype=torch.int64),
            "n_tokens_seen": torch.tensor(self.n_tokens_seen, dtype=torch.int64),
            "skipped_steps": torch.tensor(self.skipped_steps, dtype=torch.int64),
            "run_seconds": torch.tensor(self.run_seconds, dtype=torch.float64),
            "productive_seconds": torch.tensor(self.productive_seconds, dtype=torch.float64),
            "log_steps": torch.tensor(self.log_steps, dtype=torch.int64),
            "global_avg_losses": torch.tensor(self.global_avg_losses, dtype=torch.float64),
            "global_max_losses": torch.tensor(self.global_max_losses, dtype=torch.float64),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = int(state_dict["step"])
        self.n_tokens_seen = int(state_dict["n_tokens_seen"])
        self.skipped_steps = int(state_dict["skipped_steps"])
        self.run_seconds = float(state_dict.get("run_seconds", 0.0))
        self.productive_seconds = float(state_dict.get("productive_seconds", 0.0))
        self.log_steps = state_dict["log_steps"].tolist()
        self.global_avg_losses = state_dict["global_avg_losses"].tolist()
        self.global_max_losses = state_dict["global_max_losses"].tolist()
