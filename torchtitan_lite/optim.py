"""Optimizers, their learning-rate schedule, gradient clipping.

The learning rate at optimizer step s, counted from 1, is lr * lr_factor(s): a function of the step and the config only,
so a resume gets the same values on every topology. All model parts have the same schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.optim.lr_scheduler import LambdaLR

from torchtitan_lite.config.job_config import LRScheduler, Optimizer
from torchtitan_lite.config.sections.training import DecayType
from torchtitan_lite.distributed.reduce import norm_over_group
from torchtitan_lite.log import counted, logger
from torchtitan_lite.torch_private import set_last_lr

FUSED_DEVICES = {"cpu", "cuda", "mps", "xpu"}
"""Device types for which torch has fused Adam kernels."""


def build_optimizers(model_parts: Sequence[nn.Module], config: Optimizer) -> list[torch.optim.Optimizer]:
    """Return one optimizer for each model part, over all its parameters, which must not be on the meta device."""
    return [_build_optimizer(part, config) for part in model_parts]


def _build_optimizer(part: nn.Module, config: Optimizer) -> torch.optim.Optimizer:
    kind: type[torch.optim.Adam] = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}[config.name]
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    wanted = config.implementation
    # torch only checks at the first step, too late to choose another implementation.
    has_fused = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in part.parameters())
    if wanted == "fused" and not has_fused:
        logger.info("optimizer.implementation: there is no fused kernel for these parameters, using foreach")
        wanted = "foreach"
    return kind(part.parameters(), fused=wanted == "fused", foreach=wanted == "foreach", **settings)


def lr_factor(step: int, config: LRScheduler, total_steps: int) -> float:
    """Return the factor of the peak learning rate at `step` = 1, 2, 3 ...

    It rises linearly to 1 at step `warmup_steps`, stays at 1, then decays over the last `decay_ratio` of all steps
    (None, or more than the warm-up leaves: over all steps after the warm-up). The decay would reach `min_lr_factor` one
    step after the last, so that no step runs at it.
    """
    warmup_steps, ratio = min(config.warmup_steps, total_steps), config.decay_ratio
    rest = total_steps - warmup_steps
    decay_steps = rest if ratio is None else min(rest, round(total_steps * ratio))
    if step < warmup_steps:
        return step / warmup_steps
    into_decay = step - (total_steps + 1 - decay_steps)
    if into_decay <= 0 or decay_steps == 0:
        return 1.0
    progress = min(1.0, into_decay / decay_steps)
    return config.min_lr_factor + (1 - config.min_lr_factor) * _decayed(progress, config.decay_type)


def _decayed(progress: float, decay_type: DecayType) -> float:
    if decay_type == "linear":
        return 1 - progress
    if decay_type == "sqrt":
        return 1 - math.sqrt(progress)
    return 0.5 * (1 + math.cos(math.pi * progress))


def build_lr_schedulers(
    optimizers: Iterable[torch.optim.Optimizer], config: LRScheduler, total_steps: int
) -> list[LambdaLR]:
    """Return one scheduler for each optimizer. Call its `step()` after each `optimizer.step()`."""
    if config.warmup_steps > total_steps:
        logger.warning(
            "lr_scheduler.warmup_steps: %d is more than the %s of the run; the learning rate rises until the end",
            config.warmup_steps,
            counted(total_steps, "step"),
        )

    # A plain function: LambdaLR leaves functions out of its state dict, so at a resume the new config counts.
    def factor(steps_done: int) -> float:
        return lr_factor(steps_done + 1, config, total_steps)

    return [LambdaLR(optimizer, factor) for optimizer in optimizers]


def apply_hyperparameters(
    optimizers: Iterable[torch.optim.Optimizer], lr_schedulers: Iterable[LambdaLR], config: Optimizer
) -> None:
    """Put the config's settings into `optimizers` after a load. Settings that did not change stay bit for bit."""
    for optimizer, scheduler in zip(optimizers, lr_schedulers, strict=True):
        settings = {"betas": (config.beta1, config.beta2), "eps": config.eps, "weight_decay": config.weight_decay}
        for index in range(len(optimizer.param_groups)):
            scheduler.base_lrs[index] = config.lr
        # The same product that the scheduler's own step computes, so that the bits are the same.
        rates: list[float | Tensor] = [config.lr * factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group.update(settings, initial_lr=config.lr, lr=rate)
        set_last_lr(scheduler, rates)  # get_last_lr returns it, and there is no other way to set it.


def clip_grad_norm_(
    model_parts: Iterable[nn.Module], max_norm: float, *, pipeline: dist.ProcessGroup | None = None
) -> Tensor:
    """Scale the gradients down to a total norm of at most `max_norm`. Return the norm before that, over all ranks.

    `pipeline` is the group of the ranks that hold the other stages. **Collective** if parameters are on several ranks.
    A norm that is not finite is returned as it is and makes the gradients unusable: check it before the optimizer
    steps.
    """
    parameters = [parameter for part in model_parts for parameter in part.parameters() if parameter.grad is not None]
    for parameter in parameters:
        _reduce_gradient(parameter)
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if pipeline is not None:
        norm = norm_over_group(norm, pipeline)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _reduce_gradient(parameter: nn.Parameter) -> None:
    """Make the gradient whole if each rank has a summand of it: such a one has no norm, and clipping is lost on it.

    Sequence parallelism leaves those of norms so before torch 2.13.
    """
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and any(isinstance(placement, Partial) for placement in gradient.placements):
        assert isinstance(parameter, DTensor)
        parameter.grad = gradient.redistribute(gradient.device_mesh, parameter.placements)
