"""Warn of a save that came between two optimizer steps: the gradients that it found are in no checkpoint.

They count only if they were made after the last step, and if the next step takes them in. Each step marks the
gradients that it leaves behind, and a save marks those it finds; one that is set to None takes its mark with it. So no
value is read, nothing is kept, and no device is waited for. A few gradients stand for all of an optimizer.

Not seen are gradients that are zeroed in place, and those that DDP (`gradient_as_bucket_view`) or FSDP1 replace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchtitan_lite.log import logger
from torchtitan_lite.torch_private import holds_unsharded_gradients

_MARK = "_torchtitan_lite_found_by"
_BY_A_STEP = "step"
_BY_A_SAVE = "save"
_SAMPLED = 8
"""Of the groups of an optimizer, and of the parameters of each group."""


class GradientWatch:
    """Watches the gradients that saves find, of optimizers that have stepped, and of modules of `fully_shard`."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = parts
        self._stepped: dict[int, Any] = {}
        self._saved: int | None = None
        """The step whose save found gradients that were made after the last step."""
        self._found_unsharded = False
        self._is_done = False

    def after_save(self, step: int) -> None:
        """Note the gradients that are there now, as `step` was saved. Any rank."""
        if self._is_done:
            return
        found = [list(_gradients(each)) for each in self._stepped.values()]
        new = list(chain(*(each for each in found if not any(_mark_of(gradient) == _BY_A_STEP for gradient in each))))
        _mark(new, _BY_A_SAVE)
        self._found_unsharded = bool(self._stepped) and self._has_unsharded()
        self._saved = step if new or self._found_unsharded else None

    def before_step(self, optimizer: Any) -> None:
        """Warn, once, if the step of `optimizer` uses gradients that the last save found. Any rank."""
        if self._saved is None:
            return
        is_lost = any(_mark_of(gradient) == _BY_A_SAVE for gradient in _gradients(optimizer))
        if is_lost or (self._found_unsharded and not self._has_unsharded()):
            self._is_done = True
            logger.warning(
                "Step %d was saved between two optimizer steps, and this one uses gradients from before that save, "
                "which no checkpoint has: a run that resumes from step %d takes its first optimizer step without them. "
                "Count optimizer steps, not batches, or call save() only after optimizer.step() and zero_grad()",
                self._saved,
                self._saved,
            )
            self._saved = None

    def after_step(self, optimizer: Any) -> None:
        """Mark the gradients that the step of `optimizer` leaves behind. Any rank."""
        self._stepped[id(optimizer)] = optimizer
        _mark(_gradients(optimizer), _BY_A_STEP)

    def _has_unsharded(self) -> bool:
        """Return whether a module of `fully_shard` holds gradients that it has not reduced yet."""
        modules = chain(*(part.modules() for part in self._parts))
        return any(holds_unsharded_gradients(module) for module in modules if isinstance(module, FSDPModule))


def _gradients(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in _spread(optimizer.param_groups):
        for parameter in _spread(group["params"]):
            if parameter.grad is not None:
                yield parameter.grad


def _spread(values: Sequence[Any]) -> Sequence[Any]:
    return values[:: max(1, len(values) // _SAMPLED)]


def _mark_of(gradient: torch.Tensor) -> str:
    return getattr(gradient, _MARK, "")


def _mark(gradients: Iterable[torch.Tensor], by: str) -> None:
    for gradient in gradients:
        with suppress(AttributeError):  # A subclass may take none.
            setattr(gradient, _MARK, by)
