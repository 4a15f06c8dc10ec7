"""Every optimizer waits before each of its steps, from the start of the guard to its end."""

from __future__ import annotations

import torch

from torchtitan_lite.checkpoint.staging.guard import StagingGuard


def optimizers(count: int) -> list[torch.optim.SGD]:
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones(1)
    return [torch.optim.SGD([parameter], lr=1.0) for parameter in parameters]


def value(optimizer: torch.optim.Optimizer) -> float:
    parameter: torch.Tensor = optimizer.param_groups[0]["params"][0]
    return parameter.item()


def test_each_optimizer_waits_before_each_step_while_the_guard_is_on() -> None:
    first, second = optimizers(2)
    seen: list[tuple[float, float]] = []
    guard = StagingGuard([first, second], lambda: seen.append((value(first), value(second))))
    first.step()
    assert seen == []
    guard.start()
    guard.start()
    first.step()
    second.step()
    second.step()
    assert seen == [(0, 1), (-1, 1), (-1, 0)], "once a step, before it changes anything"
    guard.close()
    guard.close()
    first.step()
    second.step()
    assert len(seen) == 3


def test_a_guard_can_be_started_again() -> None:
    [optimizer] = optimizers(1)
    calls: list[int] = []
    guard = StagingGuard([optimizer], lambda: calls.append(1))
    for _ in range(2):
        guard.start()
        optimizer.step()
        guard.close()
    assert len(calls) == 2


class Wrapper:
    """An optimizer around another one, which it steps without a hook of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.name = "wrapper"
        self.inner = inner

    def step(self) -> None:
        self.inner.step()


def test_an_optimizer_within_another_one_waits_too() -> None:
    [inner] = optimizers(1)
    calls: list[float] = []
    guard = StagingGuard([Wrapper(inner)], lambda: calls.append(value(inner)))  # type: ignore[list-item]  # as users do
    guard.start()
    inner.step()
    guard.close()
    inner.step()
    assert calls == [1.0]
