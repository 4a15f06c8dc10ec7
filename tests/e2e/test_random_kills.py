"""SIGKILL at random moments, again and again: nothing that was reported is lost, and no loss is wrong.

A case is one job of two ranks that is killed several times, each time while it trains, stages, digests or saves. Each
start must resume from the latest step that rank 0 had reported as committed, or from a later one; with a memory tier
whose keeper lives, also not before the latest step for which every rank had reported an image. From there, every loss
must be that of the run that is not killed, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.e2e.killed_jobs import KilledJob, Order, Tally, killed_job, losses, printed, run_straight

pytestmark = pytest.mark.slow

MODES = ("async", "async_with_pinned_mem")
VICTIMS = ("rank", "ranks", "writer", "torchrun")
IMAGE_INTERVALS = (1, 5)
KILLS = 2
"""Of each job."""
MANY_KILLS = 10
"""Of each job with a memory tier that --exhaustive adds: more than 200."""
ON_DISK = [
    pytest.param(mode, victim, marks=[] if number % 2 == VICTIMS.index(victim) % 2 else [pytest.mark.exhaustive])
    for number, mode in enumerate(MODES)
    for victim in VICTIMS
]
"""Each victim once; --exhaustive adds the other mode."""
IN_MEMORY = [
    pytest.param(mode, interval, victim, kills, id=f"{mode}-{interval}-{victim}-{kills}", marks=marks)
    for kills, marks in ((KILLS, []), (MANY_KILLS, [pytest.mark.exhaustive]))
    for number, (mode, interval, victim) in enumerate(product(MODES, IMAGE_INTERVALS, (*VICTIMS, "keeper", "raising")))
    if marks or number % 5 == 0
]


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    with printed(request, Tally("random kills", "killed", "from memory", "lost", "wrong")) as counts:
        yield counts


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[int, set[str]]:
    """The losses of the run that is not killed."""
    return run_straight(Order(tmp_path_factory.mktemp("straight") / "run", {"enable_checkpoint": False}))


@pytest.mark.parametrize(("mode", "victim"), ON_DISK)
def test_a_job_killed_at_random_moments_resumes_the_latest_step_and_trains_as_if_it_was_not(
    mode: str, victim: str, straight: dict[int, set[str]], tally: Tally, tmp_path: Path
) -> None:
    order = Order(tmp_path / "run", {"async_mode": mode})
    with killed_job(order, seed=VICTIMS.index(victim)) as job:
        for number in range(KILLS):
            _resumes(job, number, tally)
            job.wait_a_moment()
            getattr(job, f"kill_{victim}")()
            tally["killed"] += 1
        _resumes(job, KILLS, tally)
    _nothing_is_wrong(order, straight, tally)


@pytest.mark.parametrize(("mode", "interval", "victim", "kills"), IN_MEMORY)
def test_a_job_with_images_resumes_the_latest_one_that_all_ranks_had_reported(
    mode: str,
    interval: int,
    victim: str,
    kills: int,
    straight: dict[int, set[str]],
    tally: Tally,
    tmp_path: Path,
    memory_tier: Path,
) -> None:
    order = Order(tmp_path / "run", {"async_mode": mode, "memory_interval": interval}, runtime=memory_tier)
    with killed_job(order, seed=kills * interval + VICTIMS.index(victim) if victim in VICTIMS else interval) as job:
        for number in range(kills):
            _resumes(job, number, tally, with_images=victim != "keeper")
            job.wait_a_moment()
            getattr(job, f"kill_{victim}")()
            tally["killed"] += 1
        _resumes(job, kills, tally, with_images=victim != "keeper")
    _nothing_is_wrong(order, straight, tally)


def _resumes(job: KilledJob, number: int, tally: Tally, *, with_images: bool = False) -> None:
    on_disk = job.acknowledged() if number else 0
    expected = max({on_disk, *(job.steps("image_ready") if with_images and number else ())})
    resumed = job.wait_for_training(number)
    tally["from memory"] += resumed > on_disk
    tally["lost"] += resumed < expected
    assert resumed >= expected, f"step {expected} was reported, step {resumed} was resumed:\n{job.order.tail()}"


def _nothing_is_wrong(order: Order, straight: dict[int, set[str]], tally: Tally) -> None:
    wrong = {step: sorted(found - straight[step]) for step, found in losses(order).items() if found - straight[step]}
    tally["wrong"] += len(wrong)
    assert not wrong, wrong
