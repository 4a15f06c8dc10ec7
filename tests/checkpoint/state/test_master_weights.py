"""Copies of the weights in a higher precision continue bit for bit, or are refused by name, wherever they are kept.

Those in an attribute that `state_dict` lacks are in test_unsaved.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.errors import ConfigError


def _copy_of(parameter: Tensor) -> Tensor:
    return parameter.detach().float().clone()


class InState(Optimizer):
    """Keeps each copy in the state of its parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter with its copy."""
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                if "master" not in state:
                    state["master"] = _copy_of(each)
                yield each, state["master"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        for parameter, copy in self.copies():
            assert parameter.grad is not None
            parameter.copy_(copy.sub_(parameter.grad.float(), alpha=0.01))


class InGroups(InState):
    """Keeps the copies of a group in a list in the group."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        for group in self.param_groups:
            group["masters"] = [_copy_of(each) for each in group["params"]]

    def copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        for group in self.param_groups:
            yield from zip(group["params"], group["masters"], strict=True)


class Offloaded(InState):
    """Has another optimizer train the copies, and returns both in a form of its own, as CPU offload does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.trained = self.param_groups[0]["params"]
        self.held = [torch.nn.Parameter(_copy_of(each)) for each in self.trained]
        self.inner = torch.optim.AdamW(self.held, lr=0.01)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        for parameter, copy in zip(self.trained, self.held, strict=True):
            assert parameter.grad is not None
            copy.grad = parameter.grad.float()
        self.inner.step()
        for parameter, copy in zip(self.trained, self.held, strict=True):
            parameter.copy_(copy)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "held": [each.detach() for each in self.held]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        for copy, value in zip(self.held, state_dict["held"], strict=True):
            copy.copy_(value)


class Delegating(Offloaded):
    """Shows the optimizer within, with its groups of copies, in place of itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.trained:
            each.grad = None

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


def bits_of(folder: Path, until: int, kind: type[Optimizer], seed: int) -> list[list[int]]:
    """Continue the run in `folder`, with a save at each step; return what this rank has of the parameters then."""
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).bfloat16()
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer, state = kind(model.parameters()), {"step": 0}
    with CheckpointManager.for_loop(
        model=model, optimizer=optimizer, states={"s": state}, folder=folder, interval=1
    ) as manager:
        manager.load()
        while state["step"] < until:
            state["step"] += 1
            batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(state["step"])).bfloat16()
            model(batch).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.save(state["step"])
    parts = [each.to_local() if dist.is_initialized() else each for each in model.parameters()]
    return [each.detach().view(torch.int16).reshape(-1).tolist() for each in parts]


def assert_continues(folder: Path, kind: type[Optimizer]) -> None:
    straight = bits_of(folder / "straight", 5, kind, 0)
    bits_of(folder / "stopped", 3, kind, 0)
    assert bits_of(folder / "stopped", 5, kind, 1) == straight


@pytest.mark.parametrize("kind", [InState, InGroups, Offloaded])
def test_copies_that_are_returned_continue_bit_for_bit(tmp_path: Path, kind: type[Optimizer]) -> None:
    assert_continues(tmp_path, kind)


@on_two_ranks
def test_under_fsdp2_copies_in_the_state_continue_and_others_are_refused(rank: int, tmp_path: Path) -> None:
    assert_continues(tmp_path, InState)
    refused = {
        InGroups: r"param_groups\.0\.weight\.masters has DTensors",
        Offloaded: "does not have the form of torch.optim",
    }
    for kind, why in refused.items():
        with pytest.raises(ConfigError, match=why):
            bits_of(tmp_path / kind.__name__, 1, kind, 0)


def test_a_wrapper_that_shows_its_copies_in_place_of_the_parameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\(Delegating\): 4 of its 4 parameters .* do not belong to the model"):
        bits_of(tmp_path, 1, Delegating, 0)
