"""The bench of restarts names every part of the time that a killed job takes to its next step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = {"start", "imports", "rendezvous", "build", "load", "step"}


@pytest.mark.exhaustive
def test_a_killed_job_is_measured_in_parts_next_to_plain_dcp_and_a_start_without_checkpoints(tmp_path: Path) -> None:
    found, place = tmp_path / "restart.json", tmp_path / "files"
    options = ["--rounds", "1", "--times", "1", "--kills", "ranks", "--only", "ours, disk", "dcp", "--interval", "4"]
    ended = subprocess.run(
        [
            sys.executable,
            str(ROOT / "scripts/bench_restart.py"),
            *options,
            "--folder",
            str(place),
            "--json",
            str(found),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert not list(place.iterdir()), "no file is left"
    assert all(len(line) <= 80 for line in ended.stdout.splitlines() if not line.startswith("not measured"))
    samples = json.loads(found.read_text())["samples"]
    seconds = {(each["workload"], each["contender"], each["figure"]): each["value"] for each in samples}
    starts = [("start", name) for name in ("fresh", "ours, disk", "dcp")]
    for case in (("ranks", "ours, disk"), ("ranks", "dcp"), *starts):
        parts = [seconds[(*case, f"{part}_seconds")] for part in PARTS]
        assert all(part >= 0 for part in parts)
        assert seconds[(*case, "total_seconds")] == pytest.approx(sum(parts))
    # Killed between two checkpoints.
    assert 0 <= seconds["ranks", "ours, disk", "lost_steps"] <= 4
    assert 0 <= seconds["ranks", "dcp", "lost_steps"] <= 4
