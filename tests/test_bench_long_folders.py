"""The bench of long histories grows one run, measures a copy of it at each length, and leaves no file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.exhaustive
def test_a_quick_run_has_the_figures_of_each_length(tmp_path: Path) -> None:
    found, place = tmp_path / "long.json", tmp_path / "files"
    command = [sys.executable, str(ROOT / "scripts/bench_long_folders.py"), "--quick", "--folder", str(place)]
    ended = subprocess.run(
        [*command, "--json", str(found)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert not list(place.iterdir()), "no file is left"
    assert all(len(line) <= 80 for line in ended.stdout.splitlines())
    figures = json.loads(found.read_text())["figures"]
    assert {kind: [*lengths] for kind, lengths in figures.items()} == {
        "steps": ["3", "10"],
        "starts": ["1", "3"],
        "tensors": ["10", "100"],
    }
    for kind in ("steps", "starts"):
        shorter, longer = figures[kind].values()
        for name in ("start s", "save s", "planning s", "retention s", "ls s", "manifest kB"):
            assert shorter[name] > 0 and longer[name] > 0
        for name in ("kept", "ledger.jsonl kB", "events.jsonl kB"):
            assert shorter[name] < longer[name], "a record that grows"
    assert figures["tensors"]["10"]["manifest kB"] < figures["tensors"]["100"]["manifest kB"]
