"""The progress of a run."""

from __future__ import annotations

import pytest
import torch

from torchtitan_lite.checkpoint.state.train_state import TrainState
from torchtitan_lite.errors import ConfigError


def trained() -> TrainState:
    state = TrainState(step=7, n_tokens_seen=2**40, skipped_steps=2)
    state.record_loss(0.1 + 0.2, 5.5)
    state.step = 8
    state.record_loss(0.2, float("inf"))
    return state


def test_all_fields_come_back_in_full_precision() -> None:
    loaded = TrainState()
    loaded.load_state_dict(trained().state_dict())
    assert loaded == trained()
    assert (loaded.log_steps, loaded.global_avg_losses) == ([7, 8], [0.1 + 0.2, 0.2])


def test_a_state_is_tensors_and_nothing_to_unpickle() -> None:
    assert all(isinstance(value, torch.Tensor) for value in trained().state_dict().values())


def test_a_state_replaces_a_longer_history() -> None:
    state = trained()
    state.load_state_dict(TrainState().state_dict())
    assert state == TrainState()


def test_a_state_dict_does_not_change_as_training_continues() -> None:
    state = trained()
    taken = state.state_dict()
    state.step += 1
    state.record_loss(1.0, 1.0)
    assert taken["step"] == 8
    loaded = TrainState()
    loaded.load_state_dict(taken)
    assert loaded.log_steps == [7, 8]


def test_a_history_of_another_length_mostly_has_the_same_shape() -> None:
    """Else each save would need a new plan."""
    shapes = set()
    state = TrainState()
    for state.step in range(5000):
        shapes.add(state.state_dict()["global_avg_losses"].shape) if state.step % 10 == 0 else None
        state.record_loss(1.0, 1.0)
    assert len(shapes) == 4
    loaded = TrainState()
    loaded.load_state_dict(state.state_dict())
    assert loaded == state


def test_a_history_has_the_next_power_of_two_as_its_length_and_1024_at_least() -> None:
    lengths = {}
    for count in (0, 1, 1023, 1024, 1025, 2048, 2049):
        state = TrainState(log_steps=[*range(count)], global_avg_losses=[1.0] * count, global_max_losses=[1.0] * count)
        taken = state.state_dict()
        assert len({taken[name].shape for name in ("log_steps", "global_avg_losses", "global_max_losses")}) == 1
        lengths[count] = len(taken["log_steps"])
    assert lengths == {0: 1024, 1: 1024, 1023: 1024, 1024: 1024, 1025: 2048, 2048: 2048, 2049: 4096}


def test_settings_of_another_model_are_refused_by_name_and_only_those_of_a_file_are_stored() -> None:
    stored = TrainState(model={"theta": 2.0, "factor": None}, records_model=True).state_dict()
    for model, finding in (({"theta": 1.0, "factor": None}, "theta 2.0 -> 1.0"), ({"theta": 2.0}, "")):
        state = TrainState(model=model)
        if finding:
            with pytest.raises(ConfigError, match=finding):
                state.check_state(stored)
        else:
            state.check_state(stored)
        assert "model" not in state.state_dict()
        state.check_state(TrainState().state_dict())
