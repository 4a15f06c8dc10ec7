"""torchtitan 0.3's own manager resumes from a converted checkpoint of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.reading.foreign_folders import run_torchtitan
from tests.titan_packages import needs_torchtitan


@pytest.mark.slow  # a cold start of torchtitan
@needs_torchtitan
def test_its_manager_resumes_with_the_same_model_optimizer_rate_step_and_losses(tmp_path: Path) -> None:
    assert run_torchtitan(Path(__file__).with_name("torchtitan_resumes.py"), tmp_path) == ""
