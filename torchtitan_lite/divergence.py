"""When training has diverged: a loss or gradient norm that is not finite, or a loss far above those before it.

Every rank is given the same values, so all of them find the same, at the same step, in every start: what the rule needs
of the steps before is in the checkpoint.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from torchtitan_lite.checkpoint.state.train_state import TrainState
from torchtitan_lite.config.job_config import Training
from torchtitan_lite.errors import TrainingDiverged


@dataclass(frozen=True)
class SpikeRule:
    """A loss is a spike if it is more than `factor` times the median of the last `window` losses."""

    factor: float
    window: int

    def finding(self, loss: float, before: Sequence[float]) -> str:
        """Return what is wrong with `loss` after the losses `before`, which are the last ones; empty if nothing is."""
        if len(before) < self.window:
            return ""
        median = statistics.median(before[-self.window :])
        if loss <= self.factor * median:
            return ""
        return f"loss is {loss:.4g}, more than {self.factor:g} x {median:.4g}, its median over {self.window} steps"


class DivergenceCheck:
    """Raises `TrainingDiverged` for a step that is not to be kept, if it `raises` at all. Any rank.

    With `skips_steps` a gradient scaler skips steps whose gradients overflowed: these are counted in the train state,
    and only `max_skipped_steps` of them in a row are too many.
    """

    def __init__(
        self,
        state: TrainState,
        rule: SpikeRule | None,
        *,
        skips_steps: bool,
        max_skipped_steps: int,
        raises: bool = True,
    ) -> None:
        self._state = state
        self._raises = raises
        self._rule = rule
        self._skips_steps = skips_steps
        self._max_skipped_steps = max_skipped_steps
        self._skipped_in_a_row = 0

    def loss(self, average: Tensor) -> None:
        """Raise unless the step's loss, averaged over all ranks, is finite and no spike."""
        if not self._raises:
            return  # Without `item`, which would wait for the device.
        loss = average.item()
        self._raise_unless_finite("loss", loss)
        if self._rule is not None:
            if finding := self._rule.finding(loss, self._state.recent_losses):
                raise TrainingDiverged(self._state.step, finding)
            self._state.recent_losses = [*self._state.recent_losses, loss][-self._rule.window :]

    def grad_norm(self, norm: Tensor) -> None:
        """Raise unless the step's gradient norm is finite, or its step may be skipped."""
        if not self._skips_steps:
            self._raise_unless_finite("grad_norm", norm.item())
        elif math.isfinite(norm.item()):
            self._skipped_in_a_row = 0
        else:
            self._skipped_in_a_row += 1
            self._state.skipped_steps += 1
            if self._skipped_in_a_row >= self._max_skipped_steps:
                self._raise_unless_finite("grad_norm", norm.item())

    def _raise_unless_finite(self, name: str, value: float) -> None:
        if self._raises and not math.isfinite(value):
            raise TrainingDiverged(self._state.step, f"{name} is {value}")


def build_divergence_check(config: Training, state: TrainState, *, skips_steps: bool) -> DivergenceCheck:
    """Return the check that `config` wants, which begins with no step skipped."""
    rule = SpikeRule(config.spike_factor, config.spike_window) if config.spike_factor else None
    return DivergenceCheck(
        state,
        rule,
        raises=config.on_divergence != "off",
        skips_steps=skips_steps,
        max_skipped_steps=config.max_skipped_steps,
    )
