"""Two jobs on one folder: the second is refused while the first runs, and a later one takes over."""

from pathlib import Path

import pytest

from tests.e2e.jobs import Job, start
from torchtitan_lite.store.layout import parse_step

ARGUMENTS = ("--training.steps=5000", "--checkpoint.interval=5")


def files(job: Job) -> dict[str, bytes]:
    """Return the files that a second job could have changed; the first one keeps appending to them."""
    return {name: (job.dump_folder / name).read_bytes() for name in ("config.json", "metrics.jsonl")}


@pytest.mark.slow
def test_the_second_is_refused_by_name_and_takes_over_when_the_first_was_killed(tmp_path: Path) -> None:
    with start(tmp_path / "run", *ARGUMENTS) as first:
        first.wait_until(lambda job: "step-5" in job.checkpoints)
        [pid] = first.pids()
        before = files(first)
        log = first.log
        with start(tmp_path / "run", *ARGUMENTS) as second:
            assert second.wait() == [1], second.log
            assert f"FolderInUse: {tmp_path / 'run' / 'checkpoint'} is in use by run " in second.log
            assert f"(process {pid} on " in second.log
        after = files(first)
        assert after["config.json"] == before["config.json"]
        assert after["metrics.jsonl"].startswith(before["metrics.jsonl"])
        assert first.processes[0].poll() is None, log
        first.kill()
        latest = max(step for name in first.checkpoints if (step := parse_step(name)) is not None)
        with start(tmp_path / "run", *ARGUMENTS) as third:
            third.wait_until(lambda job: job.events("resumed"))
            assert f"process {pid} on" in third.log and "which has ended" in third.log
            assert third.events("resumed")[0]["step"] == latest
