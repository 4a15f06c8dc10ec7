"""What a rank says when another one is killed."""

import signal
from pathlib import Path

import pytest

from tests.e2e.jobs import start
from tests.e2e.killed_jobs import BareStart, Order


@pytest.mark.slow  # A job of two processes.
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("fault", ["kill@write:rank={},step=3", "kill@step:rank={},step=4"], ids=["save", "step"])
def test_the_other_rank_says_so_in_words(fault: str, victim: int, tmp_path: Path) -> None:
    arguments = ("--training.steps=6", "--checkpoint.interval=3", "--lr_scheduler.warmup_steps=2")
    environment = {"TORCHTITAN_LITE_FAULT": fault.format(victim)}
    with start(tmp_path / "run", *arguments, ranks=2, environment=environment) as job:
        assert job.wait()[1 - victim] == 1
    lost = f"rank {1 - victim} lost its connection to another rank, which was killed or has failed: see the first error"
    assert f"ERROR - PeerLost: {lost}" in job.log
    assert ("ERROR - the save of step 3 failed: PeerLost: " in job.log) == ("write" in fault)
    assert [word for word in ("Traceback", "gloo", "GLHF", "127.0.0.1") if word in job.log] == []


@pytest.mark.slow  # A job of four processes.
@pytest.mark.parametrize("point", ["plan", "manifest"])
def test_every_rank_hears_of_a_coordinator_that_is_killed_in_the_last_save(point: str, tmp_path: Path) -> None:
    # Some ranks wait for rank 0, which gloo reports, and others only for these.
    order = Order(tmp_path / "run", {"timeout_seconds": 60}, steps=3, ranks=4, fault=f"kill@{point}:rank=0")
    started = BareStart(order, 1).wait_for_end()
    assert started.codes == [-signal.SIGKILL, 1, 1, 1], started.tail()


@pytest.mark.slow  # A job of eight processes.
def test_no_rank_waits_for_flags_of_a_step_once_it_has_heard_of_a_lost_one(tmp_path: Path) -> None:
    # The exchange of flags that is under way ends on a rank only if those that it waits for have not left.
    keys = {"interval": 1, "keep_latest_k": 1, "timeout_seconds": 60}
    order = Order(tmp_path / "run", keys, steps=6, ranks=8, fault="kill@purge:rank=0,after=1")
    started = BareStart(order, 1).wait_for_end()
    assert started.codes == [-signal.SIGKILL, *[1] * 7], started.tail()
