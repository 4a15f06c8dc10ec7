"""The bench of steps during saves prints both tables for each mode and version, and leaves no file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import bench_priority

    return bench_priority


@pytest.mark.parametrize(
    ("longest", "longest_without", "is_stalled"), [(1.5, 0.5, True), (1.5, 1.2, False), (0.9, 0.1, False)]
)
def test_a_pair_is_stalled_if_only_a_step_during_a_save_was(
    bench: ModuleType, longest: float, longest_without: float, is_stalled: bool
) -> None:
    pair = bench.Pair(longest, longest_without, during=0.1, without=0.1, background=0.2)
    assert pair.is_stalled is is_stalled


@pytest.mark.exhaustive
def test_a_quick_run_compares_two_versions_and_leaves_no_file(tmp_path: Path) -> None:
    quick = ["--pairs", "1", "--hogs", "1", "--saves", "1", "--steps", "2", "--params", "0.1"]
    modes = ["--modes", "disabled", "async"]
    command = [sys.executable, str(ROOT / "scripts" / "bench_priority.py"), *quick, *modes, "--folder", str(tmp_path)]
    found = subprocess.run([*command, "--against", str(ROOT)], capture_output=True, text=True, timeout=300)

    assert found.returncode == 0, found.stderr
    longest, _, during = found.stdout.partition("\n\n")
    cells = [line.split()[:3] for line in longest.splitlines()[2:]]
    assert cells == [["1", mode, version] for mode in ("async", "disabled") for version in ("other", "this")]
    assert [line.split()[:3] for line in during.splitlines()[1:3]] == cells[:2]
    assert "this / other" in during
    assert all(len(line) <= 80 for line in found.stdout.splitlines())
    assert not list(tmp_path.iterdir())
