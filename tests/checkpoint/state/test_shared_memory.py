"""Tensors of an optimizer that share memory come back sharing it, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoint.only_once import load_and_close, save_and_close
from tests.checkpoint.small_run import job_config, same
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.errors import SaveFailed


class Scaled(torch.optim.SGD):
    """Steps by the state that `begin` makes of the parameters, and `advance` changes."""

    begin: Callable[[list[Tensor]], list[dict[Any, Any]]]
    advance: Callable[[list[dict[Any, Any]]], object]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        parameters = [each for group in self.param_groups for each in group["params"]]
        if not self.state:
            for parameter, own in zip(parameters, type(self).begin(parameters), strict=True):
                self.state[parameter] = own
        states = [self.state[each] for each in parameters]
        type(self).advance(states)
        for parameter, own in zip(parameters, states, strict=True):
            parameter -= parameter.grad * own["scale"]


def one_counter(parameters: list[Tensor]) -> list[dict[Any, Any]]:
    count = torch.zeros(())
    return [{"scale": count} for _ in parameters]


def two_names(parameters: list[Tensor]) -> list[dict[Any, Any]]:
    states: list[dict[Any, Any]] = [{"scale": torch.zeros(())} for _ in parameters]
    return [own | {"again": own["scale"], 7: {"list": [None, own["scale"]]}} for own in states]


def parts_of_one(parameters: list[Tensor]) -> list[dict[Any, Any]]:
    whole = torch.zeros(len(parameters))
    states: list[dict[Any, Any]] = [{"scale": part} for part in whole]
    states[0]["whole"] = whole
    return states


def in_a_tuple(parameters: list[Tensor]) -> list[dict[Any, Any]]:
    states: list[dict[Any, Any]] = [{"scale": torch.zeros(())} for _ in parameters]
    return [own | {"pair": (own["scale"], 1)} for own in states]


def the_parameter(parameters: list[Tensor]) -> list[dict[Any, Any]]:
    return [{"scale": torch.zeros(()), "slow": each.detach()} for each in parameters]


def first_scale(states: list[dict[Any, Any]]) -> None:
    states[0]["scale"] += 0.1


def second_names(states: list[dict[Any, Any]]) -> None:
    for own in states:
        own["again"] += 0.1
        own[7]["list"][1] += 0.2


def run(folder: Path, begin: Any, advance: Any) -> tuple[nn.Module, Any, CheckpointManager]:
    torch.manual_seed(0)
    kind = type("Made", (Scaled,), {"begin": staticmethod(begin), "advance": staticmethod(advance)})
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    return model, optimizer, CheckpointManager(None, model, optimizer, None, {}, job_config(folder, max_failed_saves=1))


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.full((2, 3), float(step))).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(("begin", "advance"), [(one_counter, first_scale), (two_names, second_names)])
def test_one_tensor_under_many_names_is_one_again_after_a_load(tmp_path: Path, begin: Any, advance: Any) -> None:
    model, optimizer, manager = run(tmp_path, begin, advance)
    with manager:
        train(model, optimizer, range(1, 4))
        manager.save(3, force=True)
        train(model, optimizer, range(4, 7))
    again, other, manager = run(tmp_path, begin, advance)
    load_and_close(manager)
    train(again, other, range(4, 7))
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    assert same(other.state_dict(), optimizer.state_dict())


def test_a_setting_that_groups_share_is_one_tensor_again_after_a_load(tmp_path: Path) -> None:
    def started() -> tuple[nn.Module, torch.optim.Optimizer, CheckpointManager]:
        model = nn.Linear(3, 2)
        groups = [{"params": [model.weight]}, {"params": [model.bias]}]
        optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.1))
        return model, optimizer, CheckpointManager(None, model, optimizer, None, {}, job_config(tmp_path))

    _, optimizer, manager = started()
    optimizer.param_groups[0]["lr"].mul_(0.5)
    save_and_close(manager)
    _, other, manager = started()
    load_and_close(manager)
    assert other.param_groups[0]["lr"] is other.param_groups[1]["lr"]
    assert float(other.param_groups[1]["lr"]) == float(optimizer.param_groups[1]["lr"]) != 0.1


@pytest.mark.parametrize(
    ("begin", "named"),
    [
        (parts_of_one, r"optimizer\.state\.weight\.whole and optimizer\.state\.weight\.scale"),
        (in_a_tuple, r"optimizer\.state\.weight\.pair\.0 and optimizer\.state\.weight\.scale"),
        (the_parameter, r"optimizer\.state\.weight\.slow and the parameter weight"),
    ],
)
def test_tensors_that_overlap_otherwise_are_refused_at_the_first_save(tmp_path: Path, begin: Any, named: str) -> None:
    model, optimizer, manager = run(tmp_path, begin, first_scale)
    train(model, optimizer, range(1, 2))
    with manager, pytest.raises(SaveFailed, match=f"{named} share memory"):
        manager.save(1, force=True)


def test_parts_of_one_memory_that_do_not_overlap_are_saved(tmp_path: Path) -> None:
    def begin(parameters: list[Tensor]) -> list[dict[Any, Any]]:
        return [{"scale": part} for part in torch.zeros(len(parameters))]

    model, optimizer, manager = run(tmp_path, begin, first_scale)
    train(model, optimizer, range(1, 2))
    with manager:
        assert manager.save(1, force=True)
        assert manager.load()
