"""When training has diverged: a loss or gradient norm that is not finite, or a loss far above those before it.

Every rank is given the same values, so all of them find the same, at the same step, in every start: what the rule needs
of the steps before is in the checkpoint.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from torch import Tensor

from torchtitan_lite.checkpoint.state.train_state import TrainState
from torchtitan_lite.config.job_config import Training
from torchtitan_lite.errors import TrainingDiverged


class DivergenceCheck:
    """Raises `TrainingDiverged` for a step that is not to be kept, unless training.on_divergence is "off". Any rank.

    With `skips_steps` a gradient scaler skips steps whose gradients overflowed: these are counted in the train state,
    and only training.max_skipped_steps of them in a row are too many.
    """

    def __init__(self, config: Training, state: TrainState, *, skips_steps: bool) -> None:
        self._config, self._state = config, state
        self._raises = config.on_divergence != "off"
        self._skips_steps = skips_steps
        self._skipped_in_a_row = 0

    def loss(self, average: Tensor) -> None:
        """Raise unless the step's loss, averaged over all ranks, is finite and no spike."""
        if not self._raises:
            return  # Without `item`, which would wait for the device.
        loss = average.item()
        self._raise_unless_finite("loss", loss)
        if factor := self._config.spike_factor:
            window, before = self._config.spike_window, self._state.recent_losses
            if finding := spike(loss, before, factor=factor, window=window):
                raise TrainingDiverged(self._state.step, finding)
            self._state.recent_losses = [*before, loss][-window:]

    def grad_norm(self, norm: Tensor) -> None:
        """Raise unless the step's gradient norm is finite, or its step may be skipped."""
        if not self._skips_steps:
            self._raise_unless_finite("grad_norm", norm.item())
        elif math.isfinite(norm.item()):
            self._skipped_in_a_row = 0
        else:
            self._skipped_in_a_row += 1
            self._state.skipped_steps += 1
            if self._skipped_in_a_row >= self._config.max_skipped_steps:
                self._raise_unless_finite("grad_norm", norm.item())

    def _raise_unless_finite(self, name: str, value: float) -> None:
        if self._raises and not math.isfinite(value):
            raise TrainingDiverged(self._state.step, f"{name} is {value}")


def spike(loss: float, before: Sequence[float], *, factor: float, window: int) -> str:
    """Return how `loss` is above `factor` times the median of the last `window` losses `before`; empty if it is not."""
    if len(before) < window or loss <= factor * (median := statistics.median(before[-window:])):
        return ""
    return f"loss is {loss:.4g}, more than {factor:g} x {median:.4g}, its median over {window} steps"
