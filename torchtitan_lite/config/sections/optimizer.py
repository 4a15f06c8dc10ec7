"""The section [optimizer]: the optimizer and its hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torchtitan_lite.config.checks import choice, positive
from torchtitan_lite.config.field_types import check_types

OptimizerName = Literal["AdamW", "Adam"]
OptimizerImplementation = Literal["fused", "foreach", "for-loop"]


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer and its hyperparameters."""

    name: OptimizerName = "AdamW"
    """Algorithm."""

    lr: float = 8e-4
    """Peak learning rate; lr_scheduler multiplies it by a factor in [0, 1]."""

    beta1: float = 0.9
    """Decay of the running mean of gradients."""

    beta2: float = 0.95
    """Decay of the running mean of squared gradients."""

    eps: float = 1e-8
    """Term added to the denominator."""

    weight_decay: float = 0.1
    """Weight decay: decoupled in AdamW, an L2 penalty in Adam."""

    implementation: OptimizerImplementation = "fused"
    """Kernel. "fused" falls back to "foreach" on a device that has no fused kernel."""

    def __post_init__(self) -> None:
        check_types(self, "optimizer")
        positive("optimizer.lr", self.lr)
        choice("optimizer.name", self.name, get_args(OptimizerName))
        choice("optimizer.implementation", self.implementation, get_args(OptimizerImplementation))
