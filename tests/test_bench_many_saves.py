"""The bench of many saves sees what a process keeps of each: bytes, and a descriptor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.exhaustive
def test_a_leak_of_some_bytes_and_a_descriptor_is_found(tmp_path: Path) -> None:
    found, place = tmp_path / "saves.json", tmp_path / "files"
    options = ["--saves", "160", "--window", "40", "--modes", "disabled", "--leak"]
    ended = subprocess.run(
        [
            sys.executable,
            str(ROOT / "scripts/bench_many_saves.py"),
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
    assert ended.returncode in (0, 1), ended.stderr
    assert "GROWS: leak, trainer: 1 descriptors each save" in ended.stdout
    assert "GROWS: disabled, trainer: 1 descriptors" not in ended.stdout
    assert all(len(line) <= 80 for line in ended.stdout.splitlines())
    assert not list(place.iterdir()), "no file is left"
    looks = json.loads(found.read_text())["looks"]
    objects, _ = ([each["trainer_objects"] for each in looks[mode]] for mode in ("leak", "disabled"))
    assert [each["save"] for each in looks["leak"]] == [*range(10, 161, 10)]
    assert objects[-1] - objects[-5] >= 40, "an object or more of each of the last 40 saves"
