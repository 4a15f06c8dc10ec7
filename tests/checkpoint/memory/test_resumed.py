"""Starts that follow a SIGKILL: the right step, from memory where that is the run's, else from disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoint.memory.starts import KILLED, run

pytestmark = pytest.mark.usefixtures("memory_tier")


@pytest.fixture
def straight(tmp_path: Path) -> dict[int, str]:
    """The weights of a run that nothing interrupts."""
    return run(tmp_path / "straight", 12, memory_ttl_seconds=0.0, memory_interval=0, kills=False).weights


def test_a_run_killed_three_times_before_a_save_goes_on_where_it_was(tmp_path: Path, straight: dict[int, str]) -> None:
    folder = tmp_path / "run"
    first = run(folder, 4)
    assert (first.code, first.loaded, first.error) == (KILLED, None, "")
    second = run(folder, 6)
    assert (second.code, second.loaded, second.error) == (KILLED, (first.ready, "memory"), "")
    assert "From memory" in second.log
    third = run(folder, second.ready)  # It trains nothing: the image is still there, although two starts have used it.
    assert third.loaded == (second.ready, "memory")
    fourth = run(folder, 10, interval=9)
    assert fourth.loaded == (second.ready, "memory")
    assert first.weights | second.weights | fourth.weights == {n: w for n, w in straight.items() if n <= 10}
    extra = json.loads((folder / "step-9" / "manifest.json").read_bytes())["extra"]
    assert extra["resumed_from_memory"] == second.ready
    assert run(folder, 12).loaded == (fourth.ready, "memory")
