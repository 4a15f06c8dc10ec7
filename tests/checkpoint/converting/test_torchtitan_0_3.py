"""torchtitan 0.3's own manager resumes from a converted checkpoint of ours; skipped if that is not installed."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

DEADLINE_SECONDS = 300.0


@pytest.mark.slow  # a cold start of torchtitan
def test_its_manager_resumes_with_the_same_model_optimizer_rate_step_and_losses(tmp_path: Path) -> None:
    try:
        installed = version("torchtitan")
    except PackageNotFoundError:
        installed = "none"
    if not installed.startswith("0.3."):
        pytest.skip(f"needs torchtitan 0.3, found {installed}")
    program = Path(__file__).with_name("torchtitan_resumes.py")
    ended = subprocess.run(
        [sys.executable, program, tmp_path], capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
