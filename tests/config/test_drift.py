"""What a changed configuration means at resume."""

import json
from typing import Any

import pytest

from torchtitan_lite.config.drift import REFUSED, WARNED, Rule, compare_configs, rule_of
from torchtitan_lite.config.job_config import Checkpoint, Job, JobConfig, Model, Optimizer, Training
from torchtitan_lite.errors import ConfigError


def test_an_unchanged_configuration_has_no_changes() -> None:
    assert compare_configs(_stored(JobConfig()), JobConfig()) == []


def test_a_longer_run_is_honoured_with_a_warning_and_names_both_values() -> None:
    (change,) = compare_configs(_stored(JobConfig()), JobConfig(training=Training(steps=20000)))
    assert change.rule is Rule.WARNED
    assert str(change).startswith("training.steps: 10000 -> 20000  honoured, with a warning (the learning rate's curve")


def test_the_way_of_saving_may_change_freely() -> None:
    (change,) = compare_configs(_stored(JobConfig()), JobConfig(checkpoint=Checkpoint(async_mode="async")))
    assert (change.key, change.rule) == ("checkpoint.async_mode", Rule.HONOURED)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (JobConfig(model=Model(flavor="8B")), "model.flavor"),
        (JobConfig(optimizer=Optimizer(name="Adam")), "optimizer.name"),
        (JobConfig(training=Training(seq_len=64)), "training.seq_len"),
        (JobConfig(training=Training(dataset="text", dataset_path="*.txt")), "training.dataset"),
    ],
)
def test_a_change_that_makes_another_run_is_refused_with_both_values_and_the_fix(config: JobConfig, key: str) -> None:
    refused = [change for change in compare_configs(_stored(JobConfig()), config) if change.rule is Rule.REFUSED]
    (change,) = refused
    assert change.key == key
    assert f"{change.before} -> {change.now}" in str(change) and change.note


def test_a_refused_key_of_a_state_that_is_not_loaded_is_a_warning() -> None:
    config = JobConfig(training=Training(seq_len=64), checkpoint=Checkpoint(exclude_from_loading=("dataloader",)))
    (change,) = [change for change in compare_configs(_stored(JobConfig()), config) if change.key == "training.seq_len"]
    assert change.rule is Rule.WARNED and change.note == "dataloader is not loaded"


def test_a_key_that_the_checkpoint_lacks_is_compared_with_its_default() -> None:
    stored = _stored(JobConfig())
    del stored["model"]["dropout"]
    assert compare_configs(stored, JobConfig()) == []
    (change,) = compare_configs(stored, JobConfig(model=Model(dropout=0.1)))
    assert (change.before, change.now) == (0.0, 0.1)


def test_lists_are_the_same_in_json_and_here() -> None:
    config = JobConfig(checkpoint=Checkpoint(load_exclude=("a", "b")))
    assert compare_configs(_stored(config), config) == []


def test_the_step_to_load_and_the_config_file_are_not_compared() -> None:
    assert (
        compare_configs(_stored(JobConfig()), JobConfig(job=Job(config_file="x"), checkpoint=Checkpoint(load_step=3)))
        == []
    )


def test_every_rule_is_of_a_key_that_exists() -> None:
    keys = {f"{section}.{key}" for section, values in JobConfig().to_dict().items() for key in values}
    assert {*WARNED, *REFUSED} <= keys
    assert {rule_of(key) for key in keys} == set(Rule)


def _stored(config: JobConfig) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(json.dumps(config.to_dict()))
    return stored


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        (Checkpoint, {"export_folder": "./checkpoint/"}, "is checkpoint.folder too"),
        (Checkpoint, {"create_seed_checkpoint": True}, "nothing would be saved"),
        (Checkpoint, {"create_seed_checkpoint": True, "enable_checkpoint": True, "load_only": True}, "nothing would"),
        (Training, {"max_norm": float("inf")}, "expected a positive finite number, found inf"),
    ],
)
def test_values_that_would_lose_a_checkpoint_are_refused(section: Any, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        section(**values)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (Checkpoint(export_folder="export"), Checkpoint(), "checkpoint.export_folder: export -> (none)"),
        (Checkpoint(), Checkpoint(export_folder="export"), "checkpoint.export_folder: (none) -> export"),
    ],
)
def test_an_empty_value_is_shown_as_none_in_parentheses(before: Checkpoint, now: Checkpoint, said: str) -> None:
    (change,) = compare_configs(_stored(JobConfig(checkpoint=before)), JobConfig(checkpoint=now))
    assert str(change).startswith(f"{said}  honoured")


def test_an_unset_value_is_shown_as_none_in_parentheses() -> None:
    (change,) = compare_configs(_stored(JobConfig()), JobConfig(training=Training(seed=3)))
    assert str(change).startswith("training.seed: (none) -> 3")


def test_another_global_batch_is_honoured_because_the_loader_warns() -> None:
    (change,) = compare_configs(_stored(JobConfig()), JobConfig(training=Training(global_batch_size=16)))
    assert change.rule is Rule.HONOURED
