"""Ctrl-C while a trainer imports what it needs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow  # a cold start of the trainer
def test_ctrl_c_during_the_imports_ends_the_trainer_without_a_traceback(tmp_path: Path) -> None:
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    command = [sys.executable, str(ROOT / "train.py"), "--job.config_file", "llama_debug.toml"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGINT
    assert "Traceback" not in ended.stderr
