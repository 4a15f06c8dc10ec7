"""A save between two optimizer steps loses gradients: one warning says so, and no loop that loses none has a line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.checkpoint.small_run import job_config
from tests.logged import logged_warnings
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint.manager import CheckpointManager

LOST = "was saved between two optimizer steps"


class Loop:
    """A model, two optimizers over its halves, and a manager that saves at every call."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        self.model = nn.Sequential(self.one, self.two)
        self.first = torch.optim.SGD(self.one.parameters(), lr=0.1, momentum=0.9)
        self.second = torch.optim.AdamW(self.two.parameters())
        self.both = [self.first, self.second]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        config = job_config(folder, interval=1)
        self.manager = CheckpointManager(None, self.model, self.both, None, None, config)

    def backward(self, scale: float = 1.0) -> None:
        (self.model(torch.ones(1, 2)).square().sum() * scale).backward()

    def step(self) -> None:
        for each in self.both:
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.both:
            each.zero_grad(set_to_none=set_to_none)


def lost(train: Callable[[Loop, int], None], folder: Path, batches: int = 6) -> list[str]:
    """Return the warnings of a loop that calls `train` for each batch, and saves after it."""
    loop = Loop(folder)
    with logged_warnings() as warnings, loop.manager:
        for batch in range(1, batches + 1):
            train(loop, batch)
            loop.manager.save(batch)
    return [line for line in warnings if LOST in line]


def accumulates(loop: Loop, batch: int) -> None:
    loop.backward()
    if batch % 3 == 0:
        loop.step()
        loop.zero_grad()


def accumulates_and_zeroes_first(loop: Loop, batch: int) -> None:
    if batch % 3 == 1:
        loop.zero_grad()
    loop.backward()
    if batch % 3 == 0:
        loop.step()


def steps_one_of_two_at_each_batch(loop: Loop, batch: int) -> None:
    loop.backward()
    loop.first.step()
    loop.first.zero_grad()
    if batch % 2 == 0:
        loop.second.step()
        loop.second.zero_grad()


def scales_and_accumulates(loop: Loop, batch: int) -> None:
    loop.scaler.scale(loop.model(torch.ones(1, 2)).square().sum()).backward()
    if batch % 2 == 0:
        for each in loop.both:
            loop.scaler.step(each)
        loop.scaler.update()
        loop.zero_grad()


@pytest.mark.parametrize(
    "train",
    [accumulates, accumulates_and_zeroes_first, steps_one_of_two_at_each_batch, scales_and_accumulates],
    ids=lambda train: train.__name__,
)
def test_a_save_between_two_steps_is_warned_of_once(train: Callable[[Loop, int], None], tmp_path: Path) -> None:
    (line,) = lost(train, tmp_path, batches=9)
    assert "Count optimizer steps" in line


def test_the_warning_names_the_step_that_was_saved(tmp_path: Path) -> None:
    (line,) = lost(accumulates, tmp_path)
    assert line.startswith("Step 5 was saved between") and "resumes from step 5" in line


def zeroes_at_the_start(loop: Loop, batch: int) -> None:
    loop.zero_grad()
    loop.backward()
    loop.step()


def zeroes_at_the_end(loop: Loop, batch: int) -> None:
    loop.backward()
    loop.step()
    loop.zero_grad()


def zeroes_in_place_at_the_start(loop: Loop, batch: int) -> None:
    loop.zero_grad(set_to_none=False)
    loop.backward()
    loop.step()


def zeroes_in_place_at_the_end(loop: Loop, batch: int) -> None:
    loop.backward()
    loop.step()
    loop.zero_grad(set_to_none=False)


def never_zeroes(loop: Loop, batch: int) -> None:
    loop.backward()
    loop.step()


def accumulates_within_a_step(loop: Loop, batch: int) -> None:
    for _ in range(3):
        loop.backward(1 / 3)
    loop.step()
    loop.zero_grad()


def clips(loop: Loop, batch: int) -> None:
    zeroes = loop.zero_grad
    zeroes()
    loop.backward()
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    nn.utils.clip_grad_value_(loop.model.parameters(), 0.01)
    loop.step()


def adversarial(loop: Loop, batch: int, set_to_none: bool = True, at_the_end: bool = False) -> None:
    """As a GAN: the loss of the second module's step leaves gradients in the first one."""
    if not at_the_end:
        loop.first.zero_grad(set_to_none=set_to_none)
    loop.one(torch.ones(1, 2)).sum().backward()
    loop.first.step()
    if at_the_end:
        loop.first.zero_grad(set_to_none=set_to_none)
    loop.second.zero_grad(set_to_none=set_to_none)
    loop.one(loop.two(torch.ones(1, 2))).square().sum().backward()
    loop.second.step()
    if at_the_end:
        loop.first.zero_grad(set_to_none=set_to_none)


def adversarial_in_place(loop: Loop, batch: int) -> None:
    adversarial(loop, batch, set_to_none=False)


def adversarial_zeroed_at_the_end(loop: Loop, batch: int) -> None:
    adversarial(loop, batch, at_the_end=True)


def scales(loop: Loop, batch: int, set_to_none: bool = True, at_the_end: bool = False) -> None:
    """The first, third and fourth steps overflow and are skipped."""
    if not at_the_end:
        loop.zero_grad(set_to_none)
    factor = float("inf") if batch in (1, 3, 4) else 1.0
    loop.scaler.scale(loop.model(torch.ones(1, 2)).square().sum() * factor).backward()
    for each in loop.both:
        loop.scaler.unscale_(each)
        loop.scaler.step(each)
    loop.scaler.update()
    if at_the_end:
        loop.zero_grad(set_to_none)


def scales_in_place(loop: Loop, batch: int) -> None:
    scales(loop, batch, set_to_none=False)


def scales_and_zeroes_at_the_end(loop: Loop, batch: int) -> None:
    scales(loop, batch, at_the_end=True)


def scales_and_zeroes_in_place_at_the_end(loop: Loop, batch: int) -> None:
    scales(loop, batch, set_to_none=False, at_the_end=True)


def puts_gradients_there_itself(loop: Loop, batch: int) -> None:
    for parameter in loop.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    loop.step()


@pytest.mark.parametrize(
    "train",
    [
        zeroes_at_the_start,
        zeroes_at_the_end,
        zeroes_in_place_at_the_start,
        zeroes_in_place_at_the_end,
        never_zeroes,
        accumulates_within_a_step,
        clips,
        adversarial,
        adversarial_in_place,
        adversarial_zeroed_at_the_end,
        scales,
        scales_in_place,
        scales_and_zeroes_at_the_end,
        scales_and_zeroes_in_place_at_the_end,
        puts_gradients_there_itself,
    ],
    ids=lambda train: train.__name__,
)
def test_a_loop_that_loses_no_gradients_has_no_line(train: Callable[[Loop, int], None], tmp_path: Path) -> None:
    assert not lost(train, tmp_path)


def test_a_closure_and_steps_within_the_backward_pass_have_no_line(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS([model.weight], max_iter=3)
    own = torch.optim.SGD([model.bias], lr=0.1)

    def step_within(parameter: Tensor) -> None:
        own.step()
        own.zero_grad()

    model.bias.register_post_accumulate_grad_hook(step_within)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss.item()

    config = job_config(tmp_path, interval=1)
    with logged_warnings() as warnings, CheckpointManager(None, model, [optimizer, own], None, None, config) as manager:
        for step in range(1, 5):
            optimizer.step(closure)
            manager.save(step)
    assert not warnings


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


@pytest.mark.slow
@pytest.mark.parametrize("syncs", [True, False])
@pytest.mark.parametrize("wrap", [ddp, fsdp])
@on_two_ranks
def test_ranks_that_accumulate_are_warned_of(rank: int, tmp_path: Path, wrap: Any, syncs: bool) -> None:
    for loses in (True, False):
        found = lost_on_ranks(tmp_path / str(loses), wrap, syncs, loses)
        assert len(found) == (1 if loses and rank == 0 else 0)


def lost_on_ranks(folder: Path, wrap: Any, syncs: bool, loses: bool) -> list[str]:
    torch.manual_seed(0)
    model = wrap(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())

    def within(is_last: bool) -> AbstractContextManager[None]:
        if wrap is fsdp:
            model.set_requires_gradient_sync(syncs or is_last)
        return nullcontext() if syncs or is_last or wrap is fsdp else model.no_sync()

    config = job_config(folder, interval=1)
    with logged_warnings() as warnings, CheckpointManager(None, model, optimizer, None, None, config) as manager:
        for batch in range(1, 7):
            is_last = batch % 2 == 0
            with within(is_last):
                model(torch.ones(2, 4)).square().sum().backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
            if is_last or loses:
                manager.save(batch)
    return [line for line in warnings if LOST in line]
