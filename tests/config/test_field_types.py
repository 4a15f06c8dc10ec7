"""A section that is made in Python is checked like one that is read from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.config.job_config import Checkpoint, Job, JobConfig, Model, Parallelism, Training
from torchtitan_lite.errors import ConfigError


@pytest.mark.parametrize(
    ("section", "given", "message"),
    [
        (
            Checkpoint,
            {"interval": "5"},
            r"^checkpoint\.interval: expected a whole number, found the string '5' \(write",
        ),
        (Checkpoint, {"interval": 2.5}, r"expected a whole number, found the number 2\.5"),
        (Checkpoint, {"interval": None}, r"expected a whole number, found None"),
        (Checkpoint, {"enable_checkpoint": 1}, r"expected true or false, found the number 1"),
        (Checkpoint, {"keep_latest_k": True}, r"expected a whole number, found true"),
        (Checkpoint, {"async_mode": None}, r"expected one of disabled, async"),
        (Checkpoint, {"when_busy": "never"}, r"^checkpoint\.when_busy: expected one of wait, skip, found 'never'\."),
        (Model, {"name": "gpt2"}, r"^model\.name: expected one of llama3, found 'gpt2'\."),
        (Checkpoint, {"keep_latest_k": -1}, r"^checkpoint\.keep_latest_k: expected at least 0, found -1\."),
        (Parallelism, {"pipeline_parallel_microbatches": 0}, r"microbatches: expected at least 1, found 0\."),
        (Checkpoint, {"exclude_from_loading": "optimizer"}, r"found the string 'optimizer'\. Write \('optimizer',\)"),
        (Checkpoint, {"load_include": (3,)}, r"expected a list of strings, found \(3,\)"),
        (Training, {"max_norm": "1.0"}, r"expected a number, found the string '1\.0'"),
        (Job, {"dump_folder": 3}, r"^job\.dump_folder: expected a string, found the number 3"),
        (JobConfig, {"checkpoint": {"interval": 5}}, r"^checkpoint: expected Checkpoint\(\.\.\.\), found a dict"),
        (JobConfig, {"job": Checkpoint()}, r"^job: expected Job\(\.\.\.\), found Checkpoint"),
    ],
)
def test_a_value_of_another_kind_is_refused_with_what_was_expected(
    section: type, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        section(**given)


def test_a_path_becomes_its_text_and_a_list_becomes_a_tuple() -> None:
    job: Any = Path("outputs")
    assert Job(dump_folder=job).dump_folder == "outputs"
    names: Any = ["optimizer", "lr_scheduler"]
    assert Checkpoint(exclude_from_loading=names).exclude_from_loading == ("optimizer", "lr_scheduler")
    assert Training(max_norm=1).max_norm == 1
    assert Training(seed=None).seed is None


def test_a_choice_gets_its_exact_spelling_as_on_the_command_line() -> None:
    given: Any = "FULL"
    assert Checkpoint(verify_on_load=given).verify_on_load == "full"
