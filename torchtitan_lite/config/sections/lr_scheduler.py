"""The section [lr_scheduler]: the schedule of the learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torchtitan_lite.config.checks import at_least, choice
from torchtitan_lite.config.field_types import check_types
from torchtitan_lite.errors import ConfigError

DecayType = Literal["linear", "sqrt", "cosine"]


@dataclass(frozen=True, kw_only=True)
class LRScheduler:
    """The schedule of the learning rate: linear warm-up, constant, decay."""

    warmup_steps: int = 200
    """Steps of linear rise from 0 to the peak."""

    decay_ratio: float | None = None
    """Fraction of all steps spent in decay; unset: every step after warm-up; 0: none, constant after warm-up."""

    decay_type: DecayType = "linear"
    """Shape of the decay."""

    min_lr_factor: float = 0.0
    """Fraction of the peak learning rate at which the decay ends."""

    def __post_init__(self) -> None:
        check_types(self, "lr_scheduler")
        at_least("lr_scheduler.warmup_steps", self.warmup_steps, 0)
        choice("lr_scheduler.decay_type", self.decay_type, get_args(DecayType))
        for name, value in (("decay_ratio", self.decay_ratio), ("min_lr_factor", self.min_lr_factor)):
            if value is not None and not 0.0 <= value <= 1.0:
                raise ConfigError(f"lr_scheduler.{name}: expected a number in [0, 1], found {value}.")
