"""A key that takes a number, or one word in its place: `comm.hang_seconds`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.config.job_config import Comm
from torchtitan_lite.config.manager import parse_config
from torchtitan_lite.errors import ConfigError


@pytest.mark.parametrize(("written", "value"), [("0", 0), ("30", 30), ('"auto"', "auto")])
def test_a_file_gives_a_number_or_the_word(written: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f"comm.hang_seconds = {written}\n")
    assert parse_config([f"--job.config_file={tmp_path / 'run.toml'}"]).comm.hang_seconds == value


@pytest.mark.parametrize(("written", "value"), [("0", 0), ("30", 30), ("auto", "auto")])
def test_the_command_line_gives_a_number_or_the_word(written: str, value: object) -> None:
    assert parse_config([f"--comm.hang_seconds={written}"]).comm.hang_seconds == value


@pytest.mark.parametrize("written", ["often", "2.5", "None", ""])
def test_another_word_is_refused_with_what_was_expected(written: str) -> None:
    with pytest.raises(ConfigError, match='expected a whole number or "auto"'):
        parse_config([f"--comm.hang_seconds={written}"])


@pytest.mark.parametrize("value", ["often", "30", 2.5, True, None])
def test_a_section_made_in_python_is_checked_too(value: Any) -> None:
    with pytest.raises(ConfigError, match=r'^comm\.hang_seconds: expected a whole number or "auto", found'):
        Comm(hang_seconds=value)


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"comm\.hang_seconds .*: expected at least 0, found -1"):
        Comm(hang_seconds=-1)


def test_seconds_after_which_the_others_gave_up_are_refused() -> None:
    assert Comm(hang_seconds=99).hang_seconds == 99
    with pytest.raises(ConfigError, match=r"less than comm\.train_timeout_seconds \(100\).*found 100\. Raise"):
        Comm(hang_seconds=100)
