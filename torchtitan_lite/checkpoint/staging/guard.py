"""Make optimizers wait while their state is being staged.

A hook in each optimizer waits, before every step, until the state may change. So a training loop that
does not call `maybe_wait_for_staging()` cannot tear a snapshot.
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
        """Make the optimizers wait from now on. Idempotent."""
        if not self._handles:
            hooked = [inner for each in self._optimizers for inner in _with_wrapped(each) if _takes_hooks(inner)]
            self._handles = [each.register_step_pre_hook(self._before_step) for each in hooked]

    def close(self) -> None:
        """Remove the hooks from the optimizers. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._wait()


def _with_wrapped(optimizer: Any) -> list[Any]:
    """Return `optimizer` and the optimizers that it wraps: a wrapper may step without running its own hooks."""
    return [optimizer, *(value for value in vars(optimizer).values() if isinstance(value, Optimizer))]


def _takes_hooks(optimizer: Any) -> bool:
    return isinstance(getattr(optimizer, "_optimizer_step_pre_hooks", None), dict)
