"""The forms in which a manager accepts models, optimizers and schedulers, and its errors for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.checkpoint.only_once import load_and_close, save_and_close
from tests.checkpoint.small_run import job_config, same
from tests.checkpoint.state.optimizers_of_torch import Regression, state_of, train_step
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.state.stateful import LRSchedulerWrapper
from torchtitan_lite.checkpoint.state.train_state import TrainState
from torchtitan_lite.errors import CheckpointMismatch, ConfigError


def managed(
    folder: Path, model: Any, optimizers: Any, schedulers: Any = None, states: Any = None, **options: Any
) -> CheckpointManager:
    return CheckpointManager(None, model, optimizers, schedulers, states, job_config(folder, **options))


def matrices_and_vectors(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Two optimizers for one module, as Muon and AdamW are used."""
    matrices = [each for each in model.parameters() if each.dim() == 2 and each.requires_grad]
    vectors = [each for each in model.parameters() if each.dim() < 2 and each.requires_grad]
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(vectors, lr=0.01)]


def one_for_each(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam([each]) for each in model.parameters() if each.requires_grad]


@pytest.mark.parametrize("forms", ["bare", "lists"])
@pytest.mark.parametrize("build", [matrices_and_vectors, one_for_each, lambda model: []])
def test_any_number_of_optimizers_comes_back(tmp_path: Path, build: Any, forms: str) -> None:
    def run(folder: Path) -> tuple[Any, Any, CheckpointManager]:
        torch.manual_seed(0)
        model = Regression()
        optimizers = build(model)
        return model, optimizers, managed(folder, model if forms == "bare" else [model], optimizers)

    model, optimizers, manager = run(tmp_path)
    with manager:
        for step in (1, 2):
            for optimizer in optimizers:
                train_step(model, optimizer, step)
        manager.save(2, force=True)
    again, others, loading = run(tmp_path)
    load_and_close(loading)
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    assert same([state_of(each) for each in others], [state_of(each) for each in optimizers])


def test_one_optimizer_and_one_scheduler_need_no_lists(tmp_path: Path) -> None:
    def run() -> tuple[Any, Any, CheckpointManager]:
        model = Regression()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return optimizer, scheduler, managed(tmp_path, model, optimizer, scheduler)

    optimizer, scheduler, manager = run()
    optimizer.step()
    scheduler.step()
    save_and_close(manager)
    optimizer, scheduler, manager = run()
    load_and_close(manager)
    assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch) == (0.25, 1)


def test_without_an_optimizer_the_model_of_a_full_checkpoint_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Regression()
    optimizer = torch.optim.Adam(model.parameters())
    train_step(model, optimizer, 1)
    save_and_close(managed(tmp_path, model, optimizer))
    again = Regression()
    load_and_close(managed(tmp_path, again, None, load_only=True))
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    assert "states that this run does not load, and will not save: optimizer" in caplog.text


def test_parameters_of_a_loss_are_named_by_its_state(tmp_path: Path) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(3))

    def run() -> tuple[Any, Any, CheckpointManager]:
        model, loss = Regression(), Loss()
        optimizer = torch.optim.Adam([*model.parameters(), *loss.parameters()])
        return loss, optimizer, managed(tmp_path, model, optimizer, None, {"loss": loss})

    loss, optimizer, manager = run()
    loss.temperature.grad = torch.ones(3)
    optimizer.step()
    save_and_close(manager)
    again, other, manager = run()
    load_and_close(manager)
    assert torch.equal(again.temperature, loss.temperature)
    assert same(state_of(other), state_of(optimizer))


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_parts": "optimizer"}, r"model: expected a module, found a SGD"),
        ({"model_parts": []}, "model: expected a module or a list of them, found none"),
        ({"model_parts": None}, "model: expected a module or a list of them, found none"),
        ({"optimizers": "model"}, r"optimizer: expected an optimizer, found a Linear"),
        ({"optimizers": "scheduler"}, r"optimizer: expected an optimizer, found a StepLR"),
        ({"optimizers": 3}, "optimizer: expected an optimizer or a list of them, found an int"),
        ({"lr_schedulers": "optimizer"}, r"lr_scheduler: expected a scheduler, found a SGD"),
        ({"lr_schedulers": [None]}, r"lr_scheduler\[0\]: expected a scheduler, found a NoneType"),
        ({"states": "scheduler"}, "states: expected a dict of names and states, found a StepLR"),
        ({"states": {"step": 3}}, r"states: 'step' is an int, which has no state_dict and load_state_dict"),
        ({"dataloader": "model"}, "dataloader: expected an object with a state, or None, found a Linear"),
    ],
)
def test_the_constructor_says_what_is_wrong_with_an_argument(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    model, optimizer = model_and_optimizer()
    known = {"model": model, "optimizer": optimizer, "scheduler": lr_scheduler.StepLR(optimizer, 1)}
    right = {"dataloader": None, "model_parts": model, "optimizers": optimizer, "lr_schedulers": None, "states": None}
    given = {name: known.get(value, value) if isinstance(value, str) else value for name, value in change.items()}
    with pytest.raises(ConfigError, match=said):
        CheckpointManager(**(right | given), job_config=job_config(tmp_path))


def test_an_optimizer_made_before_the_model_changed_is_named(tmp_path: Path) -> None:
    _, optimizer = model_and_optimizer()
    with pytest.raises(ConfigError, match=r"optimizers\[0\] \(SGD\): 2 of its 2 parameters .* do not belong to"):
        managed(tmp_path, nn.Linear(2, 2), optimizer)


def test_parameters_of_no_module_are_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(7))], lr=0.1)
    with pytest.raises(ConfigError, match=r"1 of its 3 parameters \(the first has shape \[7\]\) .* \{'loss': loss\}"):
        managed(tmp_path, model, optimizer)


def test_a_parameter_of_two_optimizers_is_named(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    with pytest.raises(ConfigError, match=r"optimizers\[1\] \(Adam\): optimizers\[0\] has the parameter 'weight' too"):
        managed(tmp_path, model, [optimizer, torch.optim.Adam(model.parameters())])


SCHEDULES = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}


def scheduled(folder: Path, rates: dict[str, float], **options: Any) -> tuple[list[Any], list[Any], CheckpointManager]:
    """Return an optimizer and a scheduler for each rate, and their manager."""
    parts = [nn.ModuleDict({f"layer{at}": nn.Linear(2, 2)}) for at, _ in enumerate(rates)]
    optimizers = [torch.optim.SGD(part.parameters(), lr=rate) for part, rate in zip(parts, rates.values(), strict=True)]
    made = [SCHEDULES[name.split("-")[0]](each) for name, each in zip(rates, optimizers, strict=True)]
    return optimizers, made, managed(folder, parts, optimizers, made, {"train_state": TrainState()}, **options)


def step_all(optimizers: list[Any], schedulers: list[Any], times: int) -> None:
    for _ in range(times):
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


def test_each_of_several_schedulers_has_its_own_state(tmp_path: Path) -> None:
    rates = {"step": 0.1, "exponential": 0.01, "plateau": 2.5e-3, "step-other": 1.0}
    optimizers, schedulers, manager = scheduled(tmp_path, rates)
    step_all(optimizers, schedulers, 3)
    save_and_close(manager, 3)
    others, again, loading = scheduled(tmp_path, rates)
    load_and_close(loading)
    for _ in range(3):
        assert [each.param_groups[0]["lr"] for each in others] == [each.param_groups[0]["lr"] for each in optimizers]
        step_all(optimizers, schedulers, 1)
        step_all(others, again, 1)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2)])
def test_schedulers_that_are_alike_resume_on_another_number_of_stages(tmp_path: Path, before: int, after: int) -> None:
    def run(number: int) -> tuple[list[Any], list[Any], CheckpointManager]:
        return scheduled(tmp_path, {f"step-{at}": 0.4 for at in range(number)}, load_strictness="ignore")

    optimizers, schedulers, manager = run(before)
    step_all(optimizers, schedulers, 4)
    save_and_close(manager, 4)
    _, schedulers, manager = run(after)
    load_and_close(manager)
    assert [each.last_epoch for each in schedulers] == [4] * after


def test_schedulers_that_differ_must_be_as_many_again(tmp_path: Path) -> None:
    optimizers, schedulers, manager = scheduled(tmp_path, {"step": 0.1, "exponential": 0.2})
    step_all(optimizers, schedulers, 1)
    save_and_close(manager)
    _, _, manager = scheduled(tmp_path, {"step": 0.1}, load_strictness="ignore")
    with manager, pytest.raises(CheckpointMismatch, match="states of 2 schedulers that differ, and this run has 1"):
        manager.load()


def test_a_scheduler_of_another_class_is_refused(tmp_path: Path) -> None:
    _, _, manager = scheduled(tmp_path, {"step": 0.1})
    save_and_close(manager)
    _, _, manager = scheduled(tmp_path, {"exponential": 0.1})
    with manager, pytest.raises(CheckpointMismatch, match=r"a StepLR, and is a ExponentialLR in this run.*exclude_"):
        manager.load()
    _, _, manager = scheduled(tmp_path, {"exponential": 0.1}, exclude_from_loading=("lr_scheduler",))
    load_and_close(manager)


@pytest.mark.parametrize(("before", "after"), [("step", "cosine"), ("exponential", "step"), ("plateau", "step")])
def test_in_an_older_checkpoint_another_class_is_known_by_its_attributes(before: str, after: str) -> None:
    """An older checkpoint has no names of classes."""

    def made(name: str) -> Any:
        return SCHEDULES[name](torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))

    stored = made(before).state_dict()
    LRSchedulerWrapper([made(before)]).load_state_dict(stored)
    with pytest.raises(CheckpointMismatch, match="was of another class than"):
        LRSchedulerWrapper([made(after)]).load_state_dict(stored)


def test_a_combined_schedule_is_known_by_its_parts(tmp_path: Path) -> None:
    def chained(*names: str) -> Any:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        return lr_scheduler.ChainedScheduler([SCHEDULES[name](optimizer) for name in names])

    stored = LRSchedulerWrapper([chained("step", "exponential")]).state_dict()
    LRSchedulerWrapper([chained("step", "exponential")]).load_state_dict(stored)
    with pytest.raises(CheckpointMismatch, match=r"ChainedScheduler\(StepLR, ExponentialLR\)"):
        LRSchedulerWrapper([chained("exponential", "step")]).load_state_dict(stored)
