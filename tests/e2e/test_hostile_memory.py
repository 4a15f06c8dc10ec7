"""A job that finds something else at its keeper than it left: one line, then the other image or the disk, all losses
exactly those of the run that nothing interrupts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.images.spoiled import HOW, fill, other_version, spoil, steps_in
from tests.e2e.jobs import Job, run, start
from tests.keepers import processes_of

pytestmark = pytest.mark.slow  # Two jobs each.

STEPS = ("--training.steps=8", "--checkpoint.interval=3", "--lr_scheduler.warmup_steps=2")
IN_MEMORY = ("--checkpoint.async_mode=async_with_pinned_mem", "--checkpoint.memory_interval=1")
SLOW = {"TORCHTITAN_LITE_FAULT": "slow@step:seconds=0.1,times=4;slow@step:step=5,seconds=60"}
"""So that step 4 has an image, too, and the job waits in step 5 for its kill."""


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run that nothing interrupts."""
    return run(tmp_path_factory.mktemp("straight") / "run", *STEPS).losses()


@pytest.fixture
def killed(tmp_path: Path, memory_tier: Path) -> Path:
    """The dump folder of a job that was killed in step 5, after a save of step 3; its images are at the keeper."""
    folder = tmp_path / "run"
    with start(folder, *STEPS, *IN_MEMORY, environment=SLOW) as job:
        job.wait_until(lambda job: "step-3" in job.checkpoints and steps_in(folder / "checkpoint")[-2:] == [3, 4])
    return folder


def continues(folder: Path, expected: int, straight: dict[int, float], memory_tier: Path) -> Job:
    """Check that the job continues after step `expected`, to the right end, with one warning; return it."""
    job = run(folder, *STEPS, *IN_MEMORY)
    assert job.events("loaded")[-1]["step"] == expected, job.log
    assert job.losses() == straight
    assert job.log.count("WARNING") == 1 or "is not used" in job.log, job.log
    assert processes_of(memory_tier) == []
    return job


@pytest.mark.parametrize("how", HOW, ids=lambda how: how.__name__)
def test_a_latest_image_that_is_not_what_it_was_gives_way_to_the_next(
    how: Callable[..., None], killed: Path, straight: dict[int, float], memory_tier: Path
) -> None:
    *others, latest = steps_in(killed / "checkpoint")
    spoil(killed / "checkpoint", [latest], how)
    job = continues(killed, max([3, *others]), straight, memory_tier)
    assert "unusable in-memory snapshot" in job.log or f"in-memory snapshot of step {latest} is not" in job.log


def test_where_no_image_is_right_the_disk_is_loaded(
    killed: Path, straight: dict[int, float], memory_tier: Path
) -> None:
    spoil(killed / "checkpoint", steps_in(killed / "checkpoint"), other_version)
    job = continues(killed, 3, straight, memory_tier)
    assert job.events("loaded")[-1]["origin"] == "disk"


def test_a_keeper_full_of_other_things_costs_one_line(
    killed: Path, straight: dict[int, float], memory_tier: Path
) -> None:
    *_, latest = steps_in(killed / "checkpoint")
    fill(killed / "checkpoint")
    job = continues(killed, latest, straight, memory_tier)
    assert job.events("image_ready")[-1]["step"] > latest, "there is room for new images"
