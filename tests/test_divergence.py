"""When a step is not to be kept."""

from __future__ import annotations

import pytest
import torch

from torchtitan_lite.checkpoint.state.train_state import TrainState
from torchtitan_lite.config.job_config import Checkpoint, JobConfig, Training
from torchtitan_lite.divergence import DivergenceCheck, spike
from torchtitan_lite.errors import ConfigError, TrainingDiverged

NAN = torch.tensor(float("nan"))


def check(state: TrainState | None = None, *, skips_steps: bool = False, **training: object) -> DivergenceCheck:
    config = Training(max_skipped_steps=3, **training)  # type: ignore[arg-type]
    return DivergenceCheck(config, state or TrainState(step=7), skips_steps=skips_steps)


def test_a_loss_that_is_not_finite_is_not_kept() -> None:
    found = check(skips_steps=True)
    found.loss(torch.tensor(5.5))
    with pytest.raises(TrainingDiverged, match="step 7: loss is nan"):
        found.loss(NAN)


def test_a_gradient_norm_that_is_not_finite_is_not_kept() -> None:
    with pytest.raises(TrainingDiverged, match="grad_norm"):
        check().grad_norm(NAN)


def test_skipped_steps_are_counted_and_are_too_many_only_in_a_row() -> None:
    state = TrainState()
    found = check(state, skips_steps=True)
    for norm in (NAN, NAN, torch.tensor(1.0), NAN, NAN):
        found.grad_norm(norm)
    assert state.skipped_steps == 4
    with pytest.raises(TrainingDiverged):
        found.grad_norm(NAN)


def test_a_run_that_checks_nothing_trains_on_and_still_counts_skipped_steps() -> None:
    state = TrainState()
    found = check(state, skips_steps=True, on_divergence="off", spike_factor=2.0, spike_window=1)
    for _ in range(4):
        found.loss(NAN)
        found.grad_norm(NAN)
    assert state.skipped_steps == 4


def test_a_spike_is_a_loss_above_its_running_median_times_the_factor() -> None:
    def finding(loss: float, before: list[float]) -> str:
        return spike(loss, before, factor=2.0, window=3)

    assert finding(4.1, [1.0, 2.0, 50.0]) == "loss is 4.1, more than 2 x 2, its median over 3 steps"
    assert not finding(4.0, [1.0, 2.0, 50.0])
    assert not finding(1000.0, [1.0, 2.0])  # Not before there are three.
    assert not finding(90.0, [1.0, 50.0, 50.0, 50.0])  # Of the last ones.


def test_a_spike_is_found_at_the_same_step_after_a_resume() -> None:
    losses = [3.0, 2.0, 2.5, 2.2, 2.1]
    straight = TrainState(step=7, loss_window=4)
    found = check(straight, spike_factor=2.0, spike_window=4)
    for loss in losses:
        found.loss(torch.tensor(loss))
    resumed = TrainState(loss_window=4)
    resumed.load_state_dict(straight.state_dict())
    assert resumed.recent_losses == straight.recent_losses == pytest.approx(losses[-4:])
    with pytest.raises(TrainingDiverged, match=r"more than 2 x 2\.15, its median over 4 steps"):
        check(resumed, spike_factor=2.0, spike_window=4).loss(torch.tensor(4.4))


def test_a_checkpoint_without_the_losses_begins_their_median_again() -> None:
    resumed = TrainState(loss_window=4, recent_losses=[1.0])
    resumed.load_state_dict(TrainState(step=3).state_dict())
    assert (resumed.step, resumed.recent_losses) == (3, [])


def test_without_the_rule_nothing_is_recorded() -> None:
    state = TrainState()
    check(state).loss(torch.tensor(2.0))
    assert "recent_losses" not in state.state_dict()


def test_wrong_values_are_refused_by_name() -> None:
    for wrong in ({"spike_factor": 1.0}, {"spike_factor": -3.0}, {"spike_window": 0}, {"max_rollbacks": 0}):
        with pytest.raises(ConfigError, match=f"training.{next(iter(wrong))}"):
            Training(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"training\.on_divergence"):
        Training(on_divergence="sometimes")  # type: ignore[arg-type]


def test_a_run_that_saves_nothing_cannot_roll_back() -> None:
    for checkpoint in (Checkpoint(), Checkpoint(enable_checkpoint=True, load_only=True)):
        with pytest.raises(ConfigError, match="'rollback' needs a run that saves checkpoints"):
            JobConfig(training=Training(on_divergence="rollback"), checkpoint=checkpoint)
