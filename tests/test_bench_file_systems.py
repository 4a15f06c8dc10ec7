"""The bench of file systems prints a line for saves and one for loads, and leaves no file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.exhaustive
def test_a_run_compares_saves_and_loads_with_those_of_others_and_leaves_no_file(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "bench_file_systems.py"), str(tmp_path)]
    found = subprocess.run([*command, "--mb", "8", "--rounds", "1"], capture_output=True, text=True, timeout=300)

    assert found.returncode == 0, found.stderr
    title, save, load = found.stdout.splitlines()
    assert title.startswith(f"{tmp_path} (") and title.endswith(" MB")
    assert all(f" {name} " in save for name in ("dd", "dcp", "ours")), save
    assert " dd " in load and " ours " in load
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_a_folder_that_cannot_be_used_ends_it_with_2(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "bench_file_systems.py"), str(tmp_path / "missing")]
    found = subprocess.run([*command, "--mb", "8"], capture_output=True, text=True, timeout=300)

    assert found.returncode == 2
    assert "cannot be used" in found.stderr
