"""Calls back around every step of the optimizers, whether or not the training loop calls the manager.

Before each step the state must be free to change, so a loop that does not call `maybe_wait_for_staging()` cannot tear
a snapshot; and what a step takes in, and what was there when it ended, is seen by those who need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

OnStep = Callable[[Any], None]
"""Gets the optimizer that steps."""


class StepHooks:
    """Calls all of `before` and `after` around each step of `optimizers`, from `start` to `close`."""

    def __init__(self, optimizers: Sequence[Optimizer], before: Sequence[OnStep], after: Sequence[OnStep] = ()) -> None:
        self._optimizers = list(optimizers)
        self._before = before
        self._after = after
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        """Call from now on. Idempotent."""
        if not self._handles:
            for each in chain.from_iterable(map(_with_wrapped, self._optimizers)):
                # Some have no hooks: wrappers that do not call Optimizer.__init__.
                with suppress(AttributeError):
                    self._handles.append(each.register_step_pre_hook(self._before_step))
                    if self._after:
                        self._handles.append(each.register_step_post_hook(self._after_step))

    def close(self) -> None:
        """Remove the hooks from the optimizers. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for each in self._before:
            each(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for each in self._after:
            each(optimizer)


def _with_wrapped(optimizer: Any) -> list[Any]:
    """Return `optimizer` and the optimizers that it wraps: a wrapper may step without running its own hooks."""
    return [optimizer, *(value for value in vars(optimizer).values() if isinstance(value, Optimizer))]
