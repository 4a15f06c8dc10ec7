"""Schedulers and optimizers whose order in their list changes between two starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.checkpoint.only_once import load_and_close, save_and_close
from tests.checkpoint.small_run import job_config, same
from tests.checkpoint.state.odd_objects import OwnForm
from tests.logged import logged_warnings
from tests.ranks import Ranks, on_two_ranks
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.state.stateful import LRSchedulerWrapper, OptimizerWrapper


class Scheduled:
    """A model with one SGD and one falling rate for each of its layers; `order` is that of the lists."""

    def __init__(self, folder: Path, order: Sequence[int] = (0, 1), names: Sequence[str] = "ab", **keys: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
        self.optimizers = [torch.optim.SGD(self.model[name].parameters(), lr=1.0 + n) for n, name in enumerate(names)]
        self.schedulers: list[Any] = [
            lr_scheduler.ExponentialLR(each, gamma=0.5 + 0.25 * n) for n, each in enumerate(self.optimizers)
        ]
        optimizers, schedulers = [self.optimizers[n] for n in order], [self.schedulers[n] for n in order]
        config = job_config(folder, interval=1, **keys)
        self.manager = CheckpointManager(None, self.model, optimizers, schedulers, None, config)

    def train(self, first: int, last: int) -> list[list[float]]:
        """Train the steps from `first` to `last`, each of which is saved. Return the rates after each."""
        rates = []
        for step in range(first, last + 1):
            for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
                optimizer.step()
                scheduler.step()
            self.manager.save(step, force=step == last)
            rates.append([group["lr"] for each in self.optimizers for group in each.param_groups])
        return rates


def test_schedulers_continue_with_their_optimizers_in_another_order(tmp_path: Path) -> None:
    straight = Scheduled(tmp_path / "straight")
    with straight.manager:
        rates = straight.train(1, 6)
    first = Scheduled(tmp_path / "cut")
    with first.manager:
        assert first.train(1, 2) == rates[:2]
    for order, begin in (((1, 0), 3), ((0, 1), 5)):
        again = Scheduled(tmp_path / "cut", order, digest_tensors=("load",))
        with again.manager:
            assert again.manager.load()
            assert again.train(begin, begin + 1) == rates[begin - 1 : begin + 1]
            assert [each.base_lrs for each in again.schedulers] == [[1.0], [2.0]]


def test_two_schedulers_of_one_optimizer_find_theirs_by_class() -> None:
    def wrapped(*names: str) -> tuple[LRSchedulerWrapper, list[Any]]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        made = {"exponential": lr_scheduler.ExponentialLR(optimizer, 0.5), "step": lr_scheduler.StepLR(optimizer, 3)}
        schedulers = [made[name] for name in names]
        return LRSchedulerWrapper(schedulers, OptimizerWrapper([model], [optimizer])), schedulers

    saved, (exponential, step) = wrapped("exponential", "step")
    exponential.gamma, step.step_size = 0.25, 7
    loaded, (other_step, other_exponential) = wrapped("step", "exponential")
    loaded.load_state_dict(saved.state_dict())
    assert (other_exponential.gamma, other_step.step_size) == (0.25, 7)


def test_a_checkpoint_without_names_of_parameters_loads_in_order(tmp_path: Path) -> None:
    first, again = Scheduled(tmp_path), Scheduled(tmp_path)
    with first.manager:
        first.train(1, 2)
    states = {str(number): each.state_dict() for number, each in enumerate(first.schedulers)}
    wrapper = LRSchedulerWrapper(again.schedulers, OptimizerWrapper([again.model], again.optimizers))
    wrapper.load_state_dict(states)
    assert [each.state_dict() for each in again.schedulers] == [each.state_dict() for each in first.schedulers]
    assert not [each for each in again.schedulers if hasattr(each, "_parameters")]


@on_two_ranks
def test_schedulers_of_pipeline_stages_are_matched_on_each_rank(rank: int, tmp_path: Path) -> None:
    names = ["embedding", "layers0"] if rank == 0 else ["output", "layers1"]
    with logged_warnings() as warnings:
        first = Scheduled(tmp_path, names=names)
        with first.manager:
            first.train(1, 2)
            expected = first.train(3, 4)
        again = Scheduled(tmp_path, (1, 0), names=names)
        with again.manager:
            assert again.manager.load(2)
            assert again.train(3, 4) == expected
    assert not [line for line in warnings if "Ranks hold different" in line]


@pytest.mark.parametrize("before", [(0, 1), (1, 0)])
def test_stages_find_the_schedulers_of_one_process_by_any_parameter(
    before: tuple[int, int], tmp_path: Path, two_ranks: Ranks
) -> None:
    whole = Scheduled(tmp_path, before, names=["first", "second"])
    with whole.manager:
        whole.train(1, 2)
        expected = whole.train(3, 4)
    assert two_ranks.run(load_part, folder=tmp_path) == [expected, expected]


def load_part(rank: int, folder: Path) -> list[list[float]]:
    """Load with each layer cut into its weight and its bias, on one rank each."""
    run = Scheduled(folder, names=["first", "second"])
    kept, other = ("weight", "bias") if rank == 0 else ("bias", "weight")
    for layer, optimizer in zip(run.model.values(), run.optimizers, strict=True):
        delattr(layer, other)
        optimizer.param_groups[0]["params"] = [getattr(layer, kept)]
    with run.manager:
        assert run.manager.load(2)
        return run.train(3, 4)


def test_states_of_complete_optimizers_follow_their_parameters(tmp_path: Path) -> None:
    def run(order: Sequence[int]) -> tuple[list[Any], CheckpointManager]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        optimizers = [OwnForm(layer.parameters(), lr=0.1, momentum=0.9) for layer in model]
        for number, (layer, optimizer) in enumerate(zip(model, optimizers, strict=True)):
            layer(torch.full((1, 2), 1.0 + number)).sum().backward()
            optimizer.step()
        config = job_config(tmp_path, digest_tensors=("load",))
        return optimizers, CheckpointManager(None, model, [optimizers[n] for n in order], None, None, config)

    optimizers, manager = run((0, 1))
    save_and_close(manager)
    again, manager = run((1, 0))
    load_and_close(manager)
    assert same([each.state_dict() for each in again], [each.state_dict() for each in optimizers])


@on_two_ranks
def test_stages_with_other_numbers_of_equal_schedulers_resume_without_a_warning(rank: int, tmp_path: Path) -> None:
    def run() -> tuple[list[lr_scheduler.LambdaLR], CheckpointManager]:
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in (["first"], ["second", "third"])[rank]})
        optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in model.values()]
        schedulers = [lr_scheduler.LambdaLR(each, lambda done: 1 / (1 + done)) for each in optimizers]
        return schedulers, CheckpointManager(None, model, optimizers, schedulers, None, job_config(tmp_path))

    with logged_warnings() as warnings:
        schedulers, manager = run()
        for scheduler in schedulers:
            scheduler.optimizer.step()
            scheduler.step()
        save_and_close(manager)
        again, manager = run()
        load_and_close(manager)
    assert [each.last_epoch for each in again] == [1] * (1 + rank)
    assert not [line for line in warnings if "Ranks hold different" in line]
