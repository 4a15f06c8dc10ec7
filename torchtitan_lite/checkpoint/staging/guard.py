"""No optimizer steps while its state is being staged.

The guard stands in the optimizers themselves: each one waits, before every step, until the state
may change. So a loop that forgets to ask cannot tear a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class StagingGuard:
    """Calls `wait` before each step of `optimizers`, from `start` to `close`."""

    def __init__(self, optimizers: Sequence[Optimizer], wait: Callable[[], None]) -> None:
        self._optimizers = list(optimizers)
        self._wait = wait
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        """The optimizers wait from now on. Idempotent."""
        if not self._handles:
            hooked = [inner for each in self._optimizers for inner in _with_wrapped(each) if _takes_hooks(inner)]
            self._handles = [each.register_step_pre_hook(self._before_step) for each in hooked]

    def close(self) -> None:
        """The optimizers are as they were. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._wait()


def _with_wrapped(optimizer: Any) -> list[Any]:
    """Return `optimizer` and those that it holds: a wrapper may step without running hooks of its own."""
    return [optimizer, *(value for value in vars(optimizer).values() if isinstance(value, Optimizer))]


def _takes_hooks(optimizer: Any) -> bool:
    return isinstance(getattr(optimizer, "_optimizer_step_pre_hooks", None), dict)
