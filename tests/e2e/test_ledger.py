"""The ledger of a job that is killed: its parts sum to the wall clock, and its redone steps are those of the logs."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.jobs import Job, start
from tests.examples import mostly_exhaustive
from tests.processes import read_lines, send
from torchtitan_lite.accounts import LEDGER_FILE, read_accounts

STEPS = 24
KILLED_AT = (8, 14, 19)


@pytest.mark.slow  # Four starts of two ranks.
@pytest.mark.parametrize("mode", mostly_exhaustive(["disabled", "async"], kept=("async",)))
def test_of_a_run_killed_three_times_parts_sum_to_the_wall_clock_and_redone_steps_are_exact(
    mode: str, tmp_path: Path
) -> None:
    folder, trained = tmp_path / "run", list[int]()
    arguments = [f"--training.steps={STEPS}", "--checkpoint.interval=5", f"--checkpoint.async_mode={mode}"]
    began = 0.0
    for step in (*KILLED_AT, 0):
        faults = [f"kill@step:step={step}"] if step else []
        faults.append("slow@write:rank=1,step=20,seconds=0.5")
        with start(folder, *arguments, ranks=2, environment={"TORCHTITAN_LITE_FAULT": ";".join(faults)}) as job:
            began = began or _created(job.processes[0].pid)
            codes = job.wait()
            assert (codes == [0, 0]) == (step == 0), job.log
        trained += _steps_in_log(job)
    ended = (folder / LEDGER_FILE).stat().st_mtime
    accounts = read_accounts(folder)
    assert sum(accounts.seconds.values()) == pytest.approx(ended - began, rel=0.01)
    assert accounts.wall_seconds == pytest.approx(ended - began, rel=0.01)
    assert accounts.redone_steps == len(trained) - len(set(trained)) > 0
    assert [start.last_step for start in accounts.starts] == [*KILLED_AT, STEPS]
    assert [start.end for start in accounts.starts] == ["", "", "", "finished"] and accounts.unclean_ends == 3
    assert all(accounts.seconds[part] > 0 for part in ("starting", "loading", "productive", "redone", "saving", "down"))
    lines = read_lines(folder / LEDGER_FILE)
    assert {line["step"]: line["slowest_rank"] for line in lines if line["record"] == "committed"}[20] == 1
    beats = [line["time"] for line in lines if line["record"] == "beat"]
    assert len(beats) >= 3, "the last step of each killed start"
    assert "Time of the run: " in job.log and "4 starts (3 ended uncleanly)" in job.log


def _steps_in_log(job: Job) -> list[int]:
    return [int(step) for step in re.findall(r"step: +(\d+)  loss:", job.log)]


def _created(pid: int) -> float:
    """Return the Unix seconds at which the process began, as the kernel knows it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    age = float(Path("/proc/uptime").read_text().split()[0]) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age


@pytest.mark.slow  # A job.
def test_a_run_that_leaves_for_a_signal_is_preempted_and_leaving(tmp_path: Path) -> None:
    with start(tmp_path / "run", "--training.steps=2000", "--checkpoint.interval=1000") as job:
        job.wait_until(lambda job: 3 in job.losses())
        send(job.processes[0].pid, signal.SIGTERM)
        assert job.wait() == [128 + signal.SIGTERM], job.log
    accounts = read_accounts(tmp_path / "run")
    (found,) = accounts.starts
    assert (found.end, found.is_clean, found.durable_step) == ("preempted", True, found.last_step)
    assert accounts.seconds["leaving"] > 0 == accounts.seconds["down"]
    assert read_lines(tmp_path / "run" / LEDGER_FILE)[-1]["signal"] == signal.SIGTERM
