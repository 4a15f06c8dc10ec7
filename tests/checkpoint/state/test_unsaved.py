"""State that training changes and no checkpoint has is named in a warning, once."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.checkpoint.small_run import job_config
from torchtitan_lite.checkpoint.manager import CheckpointManager


class Counting(nn.Linear):
    """Tables that never change, and a counter that each forward pass changes, none of them persistent."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("table", torch.full((2,), float("nan")), persistent=False)
        self.register_buffer("frequencies", torch.ones(2, dtype=torch.complex64).conj(), persistent=False)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Noisy(torch.optim.SGD):
    """Draws from a generator of its own."""

    def __init__(self, parameters: Any, make: Callable[[], Any] = lambda: torch.Generator().manual_seed(0)) -> None:
        super().__init__(parameters, lr=0.1)
        self.generator = make()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        if isinstance(self.generator, torch.Generator):
            torch.rand(1, generator=self.generator)
        else:
            self.generator.random()
        super().step()


class Aside(torch.optim.SGD):
    """Trains copies of its parameters, which are in `kept(copies)`, an attribute that its state dict lacks."""

    def __init__(self, parameters: Any, kept: Callable[[list[Tensor]], Any] = list) -> None:
        super().__init__(parameters, lr=0.1)
        self.copies = kept([each.detach().clone() for each in self.param_groups[0]["params"]])
        self.same, self.constant = self.param_groups[0]["params"], torch.ones(2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        copies = self.copies.values() if isinstance(self.copies, dict) else self.copies
        for copy, parameter in zip(copies, self.param_groups[0]["params"], strict=True):
            parameter.copy_(copy.sub_(parameter.grad, alpha=0.1))


class Around(torch.optim.SGD):
    """Has another optimizer step, whose state it does not return."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.inner = torch.optim.AdamW(self.param_groups[0]["params"], lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        self.inner.step()


class Returning(Aside):
    """Returns the copies next to its state."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "copies": self.copies}


def warnings_of(
    folder: Path, caplog: pytest.LogCaptureFixture, model: nn.Module, build: Callable[..., Any]
) -> list[str]:
    optimizer = build(model.parameters())
    with CheckpointManager(None, model, optimizer, None, {}, job_config(folder, interval=1)) as manager:
        for step in range(1, 5):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            manager.save(step)
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("Training changes")]


def test_a_buffer_that_changes_and_is_not_persistent_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = warnings_of(tmp_path, caplog, nn.Sequential(Counting()), torch.optim.SGD)
    assert warning.startswith("Training changes model.0.calls, which no checkpoint has")


@pytest.mark.parametrize(
    "make",
    [torch.Generator, random.Random, np.random.default_rng, np.random.RandomState],
    ids=["torch", "python", "numpy", "numpy's older one"],
)
def test_a_generator_of_an_optimizer_is_named(
    make: Callable[[], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (warning,) = warnings_of(tmp_path, caplog, nn.Linear(2, 2), lambda parameters: Noisy(parameters, make))
    assert warning.startswith("Training changes optimizers[0].generator, which no checkpoint has")


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (Aside, "copies[0], optimizers[0].copies[1],"),
        (partial(Aside, kept=lambda copies: dict(zip("wb", copies, strict=True))), "copies['w'], optimizers[0].copies"),
        (Around, "inner.state[0]['step'], optimizers[0].inner.state[0]['exp_avg'],"),
    ],
    ids=["in a list", "in a dict", "in another optimizer"],
)
def test_tensors_that_an_optimizer_keeps_outside_of_its_state_are_named(
    build: Callable[..., Any], named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (warning,) = warnings_of(tmp_path, caplog, nn.Linear(2, 2), build)
    assert warning.startswith(f"Training changes optimizers[0].{named}")
    assert "same" not in warning and "constant" not in warning


@pytest.mark.parametrize("build", [torch.optim.AdamW, Returning])
def test_a_run_without_such_state_has_no_warning(
    build: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not warnings_of(tmp_path, caplog, nn.Linear(2, 2), build)
