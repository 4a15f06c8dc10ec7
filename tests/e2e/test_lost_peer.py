"""What a rank says when another one is killed."""

from pathlib import Path

import pytest

from tests.e2e.jobs import start


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
