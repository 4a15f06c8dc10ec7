"""A job with images lives inside the memory that it needs without them, and restarts in the memory that it had."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cgroups import memory_group as memory_group
from tests.e2e.jobs import CONFIG, TINY, Job
from tests.e2e.killed_jobs import KilledJob, Order, killed_job
from tests.forked import REPO
from tests.keepers import has_ended
from tests.processes import send

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
            assert resumed >= ready, f"step {ready} was reported, step {resumed} was resumed:\n{job.order.tail()}"
            _trains_until_images_are_ready(job, resumed + 6)
    assert not oom_kills(memory_group)


SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4}
LONG = ("--training.batch_size=4", "--training.seq_len=256")  # A step takes more memory than is left between two.
OTHERS = pytest.mark.exhaustive  # A minute of computing each.
STEPS = 8
"""Of each start: three saves."""
LINE = re.compile(r"(?:In|No in|No more in)-memory snapshots (?:every|in this start).*")


@pytest.mark.exhaustive
@pytest.mark.parametrize("factor", [1.1, *(pytest.param(each, marks=OTHERS) for each in (1.02, 1.2, 1.4))])
@pytest.mark.parametrize("mode", [pytest.param("async", marks=OTHERS), "async_with_pinned_mem"])
def test_a_job_that_fits_without_images_is_not_killed_for_them_and_one_line_says_that_they_are_fewer(
    mode: str, factor: float, memory_group: Path, memory_tier: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **SIZES}))
    without = [*_starts(tmp_path, "without", memory_group, 2, mode, memory_interval=0)]
    peak = int((memory_group / "memory.max_usage_in_bytes").read_text())
    _end_all(memory_group)
    (memory_group / "memory.limit_in_bytes").write_text(str(int(factor * peak)))
    lines = [LINE.findall(log) for log in _starts(tmp_path, "with", memory_group, 3, mode, memory_interval=1)]
    assert not oom_kills(memory_group), lines
    assert not any(map(LINE.findall, without))
    assert all(len(each) <= 1 for each in lines), lines


def _starts(folder: Path, name: str, group: Path, number: int, mode: str, *, memory_interval: int) -> Iterator[str]:
    """Train `number` starts of one job in `group`, each killed after some steps; yield the log of each."""
    options = [f"--checkpoint.async_mode={mode}", f"--checkpoint.memory_interval={memory_interval}"]
    options += ["--checkpoint.interval=3", "--training.steps=1000", f"--model.config_path={folder / 'config.json'}"]
    command = [sys.executable, str(REPO / "train.py"), *TINY, *LONG, f"--job.dump_folder={folder / name}", *options]
    within = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group)]
    for start in range(number):
        log = folder / f"{name}-{start}.log"
        with log.open("w") as file:
            job = Job([subprocess.Popen([*within, *command], cwd=REPO, stdout=file, stderr=file)], folder / name, log)
        try:
            last = max(job.losses(), default=0) + STEPS
            job.wait_for_step(last)
        finally:
            job.kill()
        yield job.log


def oom_kills(group: Path) -> int:
    """Return how many processes of `group` the kernel has killed."""
    lines = (group / "memory.oom_control").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def _end_all(group: Path) -> None:
    """End what is left of the job before, and forget its files in the page cache."""
    for pid in (group / "cgroup.procs").read_text().split():
        send(int(pid), signal.SIGKILL)
        assert has_ended(int(pid))
    (group / "memory.force_empty").write_text("0")


def _trains_until_images_are_ready(job: KilledJob, step: int) -> None:
    job.wait_until(lambda: max(job.steps("image_ready"), default=0) >= step)
