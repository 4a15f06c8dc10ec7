"""What survives which kill: the lines in docs/where_a_step_can_be.md that this machine can try."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cgroups import V2, cgroup
from tests.cgroups import memory_group as memory_group
from tests.forked import Forked, run_module
from tests.keepers import has_ended, keepers_in
from tests.processes import own_children

pytestmark = pytest.mark.slow  # Each case starts several interpreters.

TRAINER = Path(__file__).with_name("trainer.py")
LIMIT_BYTES = 256 << 20
DEADLINE_SECONDS = 120.0


@pytest.fixture
def trainer(tmp_path: Path, memory_tier: Path) -> list[str]:
    """The arguments of a trainer, without what it does; its keeper ends with the test."""
    return [str(TRAINER), str(tmp_path), str(memory_tier)]


def looked(trainer: list[str]) -> list[str]:
    """Return what a start finds at the keeper, a line for each image."""
    done = subprocess.run([sys.executable, *trainer, "look"], stdout=-1, text=True, check=True)
    unmapped, *held = done.stdout.splitlines()
    assert unmapped == "unmapped True"
    return sorted(held)


def wait_until_kept(runtime: Path, ranks: int) -> None:
    """Wait until that many ranks have said that their image is at the keeper."""
    while len(list(runtime.glob("kept *"))) < ranks:
        assert not has_ended(os.getpid(), 0.05)


def torchrun(log: Path, trainer: list[str], act: str, *options: str) -> Forked:
    """Start torchrun, forked from a process that has loaded torch; the trainers are new interpreters."""
    launch = ["--standalone", "--nproc-per-node=2", *options, *trainer, act]
    return run_module("torch.distributed.run", launch, log, os.environ)


@pytest.mark.parametrize("act", ["raise", "killed"])
def test_workers_that_torchrun_starts_again_find_the_images_of_those_before(
    trainer: list[str], act: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    code = torchrun(log, trainer, act, "--max-restarts=1").wait(DEADLINE_SECONDS)
    assert code == 0, log.read_text()
    # Each of the two ranks of the second attempt has both. One of them may have been ended before it kept its own.
    lines = [line for line in log.read_text().splitlines() if line.startswith("held")]
    assert lines
    assert {*lines} <= {"held 0 False True", "held 1 False True"}


def test_images_outlive_torchrun_killed_with_all_workers(trainer: list[str], memory_tier: Path, tmp_path: Path) -> None:
    launcher = torchrun(tmp_path / "log", trainer, "wait")
    wait_until_kept(memory_tier, 2)
    for pid in (launcher.pid, *own_children(launcher.pid)):
        os.kill(pid, signal.SIGKILL)
    launcher.wait(DEADLINE_SECONDS)
    assert looked(trainer) == ["held 0 False True", "held 1 False True"]


def start_in(folder: Path, trainer: list[str], act: str) -> subprocess.Popen[bytes]:
    script = f'echo $$ > "{folder}/cgroup.procs" && exec "$@"'
    return subprocess.Popen(["sh", "-c", script, "sh", sys.executable, *trainer, act], stdout=-3)


def test_images_outlive_a_trainer_that_the_limit_of_its_cgroup_kills(
    trainer: list[str], memory_tier: Path, memory_group: Path
) -> None:
    (memory_group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    with start_in(memory_group, trainer, "grow") as process:
        assert process.wait(DEADLINE_SECONDS) == -signal.SIGKILL
    used = int((memory_group / "memory.usage_in_bytes").read_text())
    assert used >= 64 << 20, "the image is in the account of the cgroup in which it was made"
    assert looked(trainer) == ["held 0 False True"]
    (pid,) = keepers_in(memory_tier)
    next((memory_tier / "torchtitan_lite").iterdir()).unlink()
    assert has_ended(pid)
    assert int((memory_group / "memory.usage_in_bytes").read_text()) < 16 << 20, "its memory is free"


def test_nothing_outlives_a_kill_of_the_complete_cgroup(trainer: list[str], memory_tier: Path) -> None:
    parent = next((each for each in V2 if (each / "cgroup.controllers").exists()), None)
    if parent is None:
        pytest.skip("no cgroup v2")
    with cgroup(parent) as folder:
        if not (folder / "cgroup.kill").exists():
            pytest.skip("a kernel before 5.14 has no cgroup.kill")
        with start_in(folder, trainer, "wait"):
            wait_until_kept(memory_tier, 1)
            (pid,) = keepers_in(memory_tier)
            (folder / "cgroup.kill").write_text("1")
        assert has_ended(pid)
        assert looked(trainer) == []
