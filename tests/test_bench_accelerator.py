"""The bench of an accelerator prints every table, checks what it loads, and leaves no file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_accelerator.py"


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("memory_tier")
def test_a_small_run_measures_everything_without_a_gpu_too(tmp_path: Path) -> None:
    place, found = tmp_path / "files", tmp_path / "found.json"
    small = ["--device", "cpu", "--gigabytes", "0.02", "--rounds", "1", "--saves", "1"]
    ended = bench(*small, "--folder", str(place), "--json", str(found))
    assert ended.returncode == 0, ended.stderr
    assert all(len(line) <= 80 for line in ended.stdout.splitlines())
    samples = json.loads(found.read_text())["samples"]
    kinds = {(each["workload"], each["contender"]) for each in samples}
    ours = {f"ours, {mode}" for mode in ("async", "process", "disabled")}
    assert {("saves", name) for name in (*ours, "by hand", "dcp.async_save")} <= kinds
    hows = [f"{name}, {how}" for name in ("ours", "dcp.load", "torch.load, mmap") for how in ("cold", "warm")]
    assert {("loads", name) for name in (*hows, "ours, image in memory")} <= kinds
    assert not [*place.iterdir()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    ended = bench("--folder", str(tmp_path))
    assert (ended.returncode, ended.stdout) == (3, "")
    assert ended.stderr.startswith("This machine has no GPU")
