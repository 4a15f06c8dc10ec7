"""Two runs of one seed are the same run, also one that was resumed: the tool compares all that they saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import command
from tests.e2e.jobs import run

OPTIONS = ("--training.steps=4", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=0")


@pytest.mark.slow  # Three jobs.
def test_a_straight_run_and_a_resumed_one_have_equal_checkpoints_of_every_generator(tmp_path: Path) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    run(straight, *OPTIONS)
    run(resumed, *OPTIONS)
    run(resumed, *OPTIONS, "--checkpoint.load_step=2")
    compared = command("diff", str(straight / "checkpoint/step-4"), str(resumed / "checkpoint/step-4"))
    assert compared.code == 0, compared.out
    two, four = (straight / f"checkpoint/step-{step}" for step in (2, 4))
    assert command("diff", str(two), str(four)).code == 4
