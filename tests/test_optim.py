"""Optimizers, the learning rate at every step, gradient clipping, the check for divergence."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan_lite.config.job_config import LRScheduler, Optimizer
from torchtitan_lite.optim import (
    build_lr_schedulers,
    build_optimizers,
    clip_grad_norm_,
    lr_factor,
)


def curve(total_steps: int = 10, **others: Any) -> list[float]:
    config = LRScheduler(**{"warmup_steps": 2, "decay_ratio": None, "decay_type": "linear"} | others)
    return [lr_factor(step, config, total_steps) for step in range(1, total_steps + 1)]


def test_linear_decay_takes_everything_after_warm_up() -> None:
    assert curve() == pytest.approx([0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])


def test_a_decay_ratio_leaves_a_plateau() -> None:
    assert curve(decay_ratio=0.5) == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_the_curve_ends_at_the_minimum_one_step_after_the_last() -> None:
    config = LRScheduler(warmup_steps=2, decay_ratio=None, decay_type="linear", min_lr_factor=0.2)
    assert curve(min_lr_factor=0.2)[-1] == pytest.approx(0.3)
    assert lr_factor(11, config, 10) == pytest.approx(0.2)
    assert lr_factor(500, config, 10) == pytest.approx(0.2)


def test_warm_up_longer_than_the_run_is_a_rising_line() -> None:
    assert curve(5, warmup_steps=10) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1])


def test_decay_ratio_zero_is_constant_after_warm_up() -> None:
    assert curve(decay_ratio=0.0) == pytest.approx([0.5, *[1] * 9])


def test_decay_is_cut_to_what_warm_up_leaves() -> None:
    expected = [0.2, 0.4, 0.6, 0.8, 1, 1, 0.8, 0.6, 0.4, 0.2]
    assert curve(warmup_steps=5, decay_ratio=0.8) == pytest.approx(expected)


def test_no_warm_up_begins_at_the_peak() -> None:
    assert curve(4, warmup_steps=0) == pytest.approx([1, 0.75, 0.5, 0.25])


def test_sqrt_falls_fast_at_first() -> None:
    assert curve(decay_type="sqrt")[3:] == pytest.approx([1 - (i / 8) ** 0.5 for i in range(1, 8)])


def test_cosine_is_half_way_down_in_the_middle() -> None:
    cosine = curve(decay_type="cosine")
    assert cosine[6] == pytest.approx(0.5)
    assert cosine[3] > 7 / 8
    assert cosine[9] < 1 / 8


def test_the_learning_rate_at_step_s_is_lr_times_the_factor_of_s() -> None:
    [optimizer] = build_optimizers([nn.Linear(2, 2)], Optimizer(lr=0.1))
    [scheduler] = build_lr_schedulers([optimizer], LRScheduler(warmup_steps=2), total_steps=10)
    seen = []
    for _ in range(10):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert seen == pytest.approx([0.1 * factor for factor in curve()])


def test_a_scheduler_loaded_in_the_middle_continues_the_curve() -> None:
    [first] = build_optimizers([nn.Linear(2, 2)], Optimizer(lr=0.1))
    [before] = build_lr_schedulers([first], LRScheduler(warmup_steps=2), total_steps=10)
    for _ in range(5):
        first.step()
        before.step()
    [second] = build_optimizers([nn.Linear(2, 2)], Optimizer(lr=0.1))
    [after] = build_lr_schedulers([second], LRScheduler(warmup_steps=2), total_steps=10)
    after.load_state_dict(before.state_dict())
    second.step()
    after.step()
    assert second.param_groups[0]["lr"] == pytest.approx(0.1 * curve()[6])


def test_warm_up_longer_than_the_run_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    [optimizer] = build_optimizers([nn.Linear(2, 2)], Optimizer())
    with caplog.at_level(logging.WARNING, "torchtitan_lite"):
        logging.getLogger("torchtitan_lite").addHandler(caplog.handler)
        build_lr_schedulers([optimizer], LRScheduler(warmup_steps=11), total_steps=10)
        logging.getLogger("torchtitan_lite").removeHandler(caplog.handler)
    assert "warmup_steps: 11 is more than the 10 steps" in caplog.text


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_every_implementation_takes_the_same_step(name: Any, implementation: Any) -> None:
    config = Optimizer(name=name, implementation=implementation, lr=0.1, beta1=0.8, weight_decay=0.5)
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    model.weight.grad = torch.tensor([[3.0]])
    [optimizer] = build_optimizers([model], config)
    optimizer.step()
    # The first step of Adam is lr, in the direction of the gradient.
    expected = 2.0 * (1 - 0.1 * 0.5) - 0.1 if name == "AdamW" else 2.0 - 0.1
    assert model.weight.item() == pytest.approx(expected)
    assert type(optimizer).__name__ == name
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.95)


def test_parameters_without_a_fused_kernel_get_foreach() -> None:
    [optimizer] = build_optimizers([nn.Linear(1, 1, dtype=torch.complex64)], Optimizer(implementation="fused"))
    assert optimizer.param_groups[0]["foreach"] is True
    assert not optimizer.param_groups[0]["fused"]


def with_gradient(*values: float) -> nn.Module:
    model = nn.Linear(len(values), 1)
    model.weight.grad = torch.tensor([values])
    return model


def test_gradients_above_the_norm_are_scaled_down_over_all_parts_together() -> None:
    parts = [with_gradient(3.0), with_gradient(0.0, 4.0)]
    assert clip_grad_norm_(parts, 1.0).item() == pytest.approx(5.0)
    assert clip_grad_norm_(parts, 1.0).item() == pytest.approx(1.0, abs=1e-5)


def test_gradients_below_the_norm_stay_bitwise() -> None:
    model = with_gradient(0.3, 0.4)
    assert clip_grad_norm_([model], 1.0).item() == pytest.approx(0.5)
    assert torch.equal(model.get_parameter("weight").grad, torch.tensor([[0.3, 0.4]]))


def test_a_norm_that_is_not_finite_is_returned() -> None:
    assert not clip_grad_norm_([with_gradient(float("inf"))], 1.0).isfinite()
