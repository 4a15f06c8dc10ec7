"""SIGKILL at random moments, again and again: nothing that was reported is lost, and no loss is wrong.

A case is one job of two ranks that is killed several times, each time while it trains, stages, digests or saves. Each
start must resume from the latest step that rank 0 had reported as committed, or from a later one; and from there, every
loss must be that of the run that is not killed, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.random_kills import KilledJob, Order, killed_job, losses, run_straight

pytestmark = pytest.mark.slow

MODES = ("async", "async_with_pinned_mem")
VICTIMS = ("rank", "ranks", "writer", "torchrun")
KILLS = 2
"""Of each job."""


@dataclass
class Tally:
    """The results of all cases."""

    killed: int = 0
    lost: int = 0
    wrong: int = 0

    def __str__(self) -> str:
        return f"random kills: {self.killed} killed, {self.lost} lost, {self.wrong} wrong"


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    counts = Tally()
    yield counts
    plugins = request.config.pluginmanager
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        plugins.getplugin("terminalreporter").write_line(f"\n{counts}")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[int, set[str]]:
    """The losses of the run that is not killed."""
    return run_straight(Order(tmp_path_factory.mktemp("straight") / "run", {"enable_checkpoint": False}))


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("mode", MODES)
def test_a_job_killed_at_random_moments_resumes_the_latest_step_and_trains_as_if_it_was_not(
    mode: str, victim: str, straight: dict[int, set[str]], tally: Tally, tmp_path: Path
) -> None:
    order = Order(tmp_path / "run", {"async_mode": mode})
    with killed_job(order, seed=VICTIMS.index(victim)) as job:
        for number in range(KILLS):
            _resumes(job, number, tally)
            job.wait_a_moment()
            getattr(job, f"kill_{victim}")()
            tally.killed += 1
        _resumes(job, KILLS, tally)
    _nothing_is_wrong(order, straight, tally)


def _resumes(job: KilledJob, number: int, tally: Tally) -> None:
    expected = job.acknowledged() if number else 0
    resumed = job.wait_for_training(number)
    tally.lost += resumed < expected
    assert resumed >= expected, f"step {expected} was reported, step {resumed} was resumed:\n{job.tail()}"


def _nothing_is_wrong(order: Order, straight: dict[int, set[str]], tally: Tally) -> None:
    wrong = {step: sorted(found - straight[step]) for step, found in losses(order).items() if found - straight[step]}
    tally.wrong += len(wrong)
    assert not wrong, wrong
