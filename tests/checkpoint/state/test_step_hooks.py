"""Every optimizer calls before each of its steps, from the start of its hooks to their end."""

from __future__ import annotations

import torch

from torchtitan_lite.checkpoint.state.step_hooks import StepHooks


def optimizers(count: int) -> list[torch.optim.SGD]:
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones(1)
    return [torch.optim.SGD([parameter], lr=1.0) for parameter in parameters]


def value(optimizer: torch.optim.Optimizer) -> float:
    parameter: torch.Tensor = optimizer.param_groups[0]["params"][0]
    return parameter.item()


def test_each_optimizer_calls_before_each_step_while_the_hooks_are_on() -> None:
    first, second = optimizers(2)
    seen: list[tuple[float, float]] = []
    hooks = StepHooks([first, second], [lambda _: seen.append((value(first), value(second)))])
    first.step()
    assert seen == []
    hooks.start()
    hooks.start()
    first.step()
    second.step()
    second.step()
    assert seen == [(0, 1), (-1, 1), (-1, 0)], "once a step, before it changes anything"
    hooks.close()
    hooks.close()
    first.step()
    second.step()
    assert len(seen) == 3


def test_hooks_can_be_started_again() -> None:
    [optimizer] = optimizers(1)
    calls: list[int] = []
    hooks = StepHooks([optimizer], [lambda _: calls.append(1)])
    for _ in range(2):
        hooks.start()
        optimizer.step()
        hooks.close()
    assert len(calls) == 2


class Wrapper:
    """An optimizer around another one, which it steps without a hook of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.name = "wrapper"
        self.inner = inner

    def step(self) -> None:
        self.inner.step()


def test_an_optimizer_within_another_one_calls_too() -> None:
    [inner] = optimizers(1)
    calls: list[float] = []
    hooks = StepHooks([Wrapper(inner)], [lambda _: calls.append(value(inner))])  # type: ignore[list-item]  # as users do
    hooks.start()
    inner.step()
    hooks.close()
    inner.step()
    assert calls == [1.0]
