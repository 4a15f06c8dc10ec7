"""A job with images restarts in the memory that it had before: no second set of arenas, no copy of what it loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cgroups import memory_group as memory_group
from tests.e2e.random_kills import KilledJob, Order, killed_job

pytestmark = pytest.mark.slow

STATE_BYTES = 12 * 1024 * 8192
MARGIN = 1.2


def test_a_restart_inside_a_fifth_more_memory_than_the_peak_before_it_lives(
    memory_group: Path, memory_tier: Path, tmp_path: Path
) -> None:
    keys = {"async_mode": "async_with_pinned_mem", "memory_interval": 1, "interval": 1000}
    order = Order(tmp_path / "run", keys, width=8192, memory_group=memory_group, runtime=memory_tier)
    with killed_job(order, seed=0) as job:
        job.wait_for_training(0)
        _trains_until_images_are_ready(job, 6)
        peak = int((memory_group / "memory.max_usage_in_bytes").read_text())
        assert peak > 3 * STATE_BYTES, "the group counts the images"
        (memory_group / "memory.limit_in_bytes").write_text(str(int(MARGIN * peak)))
        for number in (1, 2):
            ready = max(job.steps("image_ready"))
            job.kill_ranks()
            resumed = job.wait_for_training(number)
            assert resumed >= ready, f"step {ready} was reported, step {resumed} was resumed:\n{job.tail()}"
            _trains_until_images_are_ready(job, resumed + 6)
    killed = [line for line in (memory_group / "memory.oom_control").read_text().splitlines() if "oom_kill " in line]
    assert killed in ([], ["oom_kill 0"])


def _trains_until_images_are_ready(job: KilledJob, step: int) -> None:
    job.wait_until(lambda: max(job.steps("image_ready"), default=0) >= step)
