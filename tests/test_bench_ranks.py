"""The bench of ranks that share parameters prints a line for each mode and version, and leaves no file."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.exhaustive
def test_a_quick_run_compares_two_versions_and_leaves_no_file(tmp_path: Path) -> None:
    quick = ["--rounds", "1", "--params", "0.1", "--train-seconds", "0", "--first", "1", "--modes", "async"]
    command = [sys.executable, str(ROOT / "scripts" / "bench_ranks.py"), *quick, "--folder", str(tmp_path)]
    found = subprocess.run([*command, "--against", str(ROOT)], capture_output=True, text=True, timeout=300)

    assert found.returncode == 0, found.stderr
    lines = [line.split() for line in found.stdout.splitlines()]
    assert [line[:2] for line in lines] == [["async", "this"], ["async", "other"]]
    assert all("first blocked" in " ".join(line) and "later" in line for line in lines)
    assert not list(tmp_path.iterdir())
