"""Every LR scheduler that `torch.optim` has, with arguments that change the LR within eight steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

Build = Callable[[Optimizer], Any]
NONE = "none"


class Inverse:
    """A schedule that is an object with state, which LambdaLR saves."""

    def __init__(self) -> None:
        self.calls = 0
        self.seen: dict[int, float] = {}

    def __call__(self, step: int) -> float:
        self.calls += 1
        self.seen[step] = 1 / (1 + step + self.calls / 100)
        return self.seen[step]


def _has_momentum(optimizer: Optimizer) -> bool:
    return bool({"momentum", "betas"} & optimizer.defaults.keys())


def _sequential(optimizer: Optimizer) -> Any:
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    steps = lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
    return lr_scheduler.SequentialLR(optimizer, [warmup, steps], milestones=[2])


def _chained(optimizer: Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=5), lr_scheduler.MultiStepLR(optimizer, [4, 6])]
    )


RECIPES: dict[str, Build] = {
    "ChainedScheduler": _chained,
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.1, total_iters=5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2, T_mult=2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=3, cycle_momentum=_has_momentum(o)),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.7),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=6),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4, 6]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.8),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10, cycle_momentum=_has_momentum(o)),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=7, power=2.0),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5, cooldown=1),
    "SequentialLR": _sequential,
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2),
    "LambdaLR of an object": lambda o: lr_scheduler.LambdaLR(o, Inverse()),
    "CyclicLR of a function": lambda o: lr_scheduler.CyclicLR(
        o, 0.001, 0.1, step_size_up=2, scale_fn=lambda x: 1 / (1 + x), scale_mode="iterations", cycle_momentum=False
    ),
    "swa_utils.SWALR": lambda o: SWALR(o, swa_lr=0.002, anneal_epochs=6),
    NONE: lambda o: None,
}


def schedulers_of_torch() -> list[str]:
    """Return the name of every concrete class of `torch.optim.lr_scheduler`."""
    members = inspect.getmembers(lr_scheduler, inspect.isclass)
    return [
        name
        for name, member in members
        if issubclass(member, lr_scheduler.LRScheduler)
        and member is not lr_scheduler.LRScheduler
        and not name.startswith("_")
    ]
