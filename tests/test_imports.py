"""A start imports only what it needs: each second of imports is a second that every restart loses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_NEEDED = ["torch.distributed.pipelining", "torch._dynamo", "transformers", "accelerate", "lightning"]
NOT_NEEDED += ["pytorch_lightning", "pyarrow", "datasets", "safetensors"]


@pytest.mark.slow  # a new interpreter with torch
def test_the_trainer_does_not_import_what_only_some_runs_need() -> None:
    code = f"import sys, torchtitan_lite.trainer; print([name for name in {NOT_NEEDED} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def test_the_configuration_is_checked_before_torch_is_imported() -> None:
    code = "import sys, torchtitan_lite.train, torchtitan_lite.config.manager; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"


@pytest.mark.slow  # a new interpreter with torch
def test_the_exit_prints_nothing_of_what_the_imports_left() -> None:
    """torch 2.14 and later bring a triton that prints 35 lines of leaks if its objects are still frozen."""
    code = "import torchtitan_lite.train; torchtitan_lite.train._import_job()"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout + ended.stderr == ""
