"""What shares a machine, a folder or a process with a run, and must neither end it nor be ended by it.

The processes are forked from a server that has torch loaded; each test says in a script what happens there.
"""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path

import pytest

from tests.checkpoint.sharded_run import sharded_run
from tests.forked import run_code
from tests.processes import wait_until
from tests.ranks import on_two_ranks

DEADLINE_SECONDS = 120.0

SAVER = """
import sys
from pathlib import Path
from torchtitan_lite.checkpoint.staging.arena import StagingArena
from torchtitan_lite.disk.block_writer import NewFileOnDisk
from torchtitan_lite.disk.writer_process import WriterProcess

arena = StagingArena(4096)
arena.memory[:5] = b"hello"
process = WriterProcess(timeout_seconds=60)
process.start()
"""


def run(script: str, folder: Path) -> tuple[int, str]:
    """Return the exit code of `script`, run in `folder`, and what it printed."""
    log = folder / "printed.log"
    log.touch()
    code = run_code(script, log, dict(os.environ), folder).wait(DEADLINE_SECONDS)
    return code, log.read_text()


def test_the_writer_process_takes_the_standard_library_and_not_what_lies_in_the_working_directory(
    tmp_path: Path,
) -> None:
    for name in ("socket", "json", "struct", "signal", "ctypes", "mmap", "xxhash", "torchtitan_lite"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the working directory was imported')\n")
    script = SAVER + 'process.write(NewFileOnDisk(Path("written").absolute()), arena, 5, step=1)\nprocess.close()\n'
    assert run(script, tmp_path) == (0, "")
    assert (tmp_path / "written").read_bytes() == b"hello"


RELATIVE = """
import os
from pathlib import Path
from tests.checkpoint.small_run import SmallRun

os.mkdir("elsewhere")
with SmallRun(Path("run"), interval=1, keep_latest_k=2, async_mode="MODE", export_folder="export",
              model_weights_only=True) as run:
    run.step()
    os.chdir("elsewhere")
    run.step()
    run.step()
    run.step(last=True)
    run.manager.close()
    print(run.manager._in_flight.last_durable)
"""


def test_a_change_of_the_working_directory_during_a_save_changes_nothing(tmp_path: Path, mode: str) -> None:
    assert run(RELATIVE.replace("MODE", mode), tmp_path) == (0, "4\n")
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoint").iterdir()) == ["step-3", "step-4"]
    assert [path.name for path in (tmp_path / "run" / "export").iterdir()] == ["step-4"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


QUIET = """
import multiprocessing, os, signal, sys, time, warnings
from pathlib import Path
from tests.checkpoint.small_run import SmallRun
warnings.simplefilter("ignore")  # Later versions of Python warn of any fork with threads.
WATCHED = ("SIGTERM", "SIGUSR1", "SIGINT")
fork = multiprocessing.get_context("fork")

def start(mode, folder="run", **options):
    return SmallRun(Path(folder), interval=1, async_mode=mode, preemption_signals=WATCHED, **options)
"""

CHILDREN = """
with start("MODE") as run:
    run.step()
    with fork.Pool(2) as pool:
        print(pool.map(abs, [-1, -2]))
    child = fork.Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join()
    run.step()
    run.step()
    print(child.exitcode, run.manager.preempted_by)
    run.manager.close()
    print(run.committed())
"""


def test_pools_and_terminated_children_neither_preempt_the_run_nor_live_on(tmp_path: Path, mode: str) -> None:
    printed = "[1, 2]\n-15 0\n[1, 2, 3]\n"
    assert run(QUIET + CHILDREN.replace("MODE", mode), tmp_path) == (0, printed)


SIGNALLED_AT_ONCE = """
with start("disabled") as run:
    run.step()
    codes = set()
    for _ in range(30):
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(3)
        os.kill(child, signal.SIGTERM)
        codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    run.step()
    run.step()
    print(codes, run.manager.preempted_by)
"""


def test_a_signal_that_comes_right_after_the_fork_ends_the_child_and_is_not_the_runs(tmp_path: Path) -> None:
    assert run(QUIET + SIGNALLED_AT_ONCE, tmp_path) == (0, "{-15} 0\n")


INHERITED = """
def sockets():
    links = {entry: os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    return {link for link in links.values() if link.startswith("socket:")}

before = sockets()
with start("async_with_pinned_mem") as run:
    run.step()
    opened = sockets() - before
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        inherited = sockets() & opened
        found = [len(inherited), signal.set_wakeup_fd(-1), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL]
        os.write(writing, repr(found).encode())
        run.manager.close()  # Of the parent's nothing is closed.
        time.sleep(60)
        os._exit(3)
    print(len(opened) >= 3, os.read(reading, 100).decode())
    run.step()
    run.manager.close()  # The child lives.
    print(run.committed())
    os.kill(child, signal.SIGKILL)
"""


def test_a_forked_child_has_none_of_our_sockets_and_handlers_and_closing_does_not_wait_for_it(tmp_path: Path) -> None:
    assert run(QUIET + INHERITED, tmp_path) == (0, "True [0, -1, True]\n[1, 2]\n")


@on_two_ranks
def test_a_forked_child_of_a_rank_waits_for_no_other_rank_when_it_closes(rank: int, tmp_path: Path) -> None:
    closed, over = tmp_path / "closed", tmp_path / "over"
    with sharded_run(tmp_path, interval=100) as run:
        run.take_step()
        run.manager.save(1)
        run.take_step()
        if rank == 1:
            wait_until(over.exists, lambda: "rank 0 has not continued")
        run.manager.save(2)  # Rank 0 begins an exchange here, which rank 1 does not take part in before `over`.
        if rank == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Later versions of Python warn of the fork.
                child = os.fork()
            if child == 0:
                try:
                    run.manager.close()
                    closed.touch()
                finally:
                    os._exit(0)
            try:
                wait_until(closed.exists, lambda: "the child waits", seconds=20)
            finally:
                over.touch()
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


TWO = """
with start("async", "a") as a, start("async", "b") as b:
    a.step(), b.step()
    os.kill(os.getpid(), signal.SIGTERM)
    while not (a.manager._preemption.received and b.manager._preemption.received):
        time.sleep(0.01)
    for run in (a, b):
        run.step(), run.step()
        run.manager.close()
        print(run.manager.preempted_by, run.committed())
"""


def test_of_two_managers_in_one_process_both_save_and_leave_for_a_signal(tmp_path: Path) -> None:
    assert run(QUIET + TWO, tmp_path) == (0, "15 [1, 2, 3]\n15 [1, 2, 3]\n")


LEFT = """
import atexit, logging, threading
from torchtitan_lite.log import logger, setup
from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.store.store import CheckpointStore
setup(0)
logger.setLevel(logging.WARNING)
in_main = threading.Event()

class Late(Durable):
    def make_dir(self, path):
        if path.name.startswith("step-2.staging-"):
            assert in_main.wait(60)
        super().make_dir(path)

def main():
    run = start("MODE", seams={"store": CheckpointStore(Path("run/checkpoint"), durable=Late())}, OPTIONS)
    run.step()
    run.step()
    LET_GO
    LEAVE

main()
"""
WAYS_TO_LEAVE = {"sys.exit": (7, "sys.exit(7)"), "an exception": (1, "raise ValueError('x')"), "the end": (0, "return")}


def leave(folder: Path, way: str, mode: str, options: str = "", let_go: str = "pass") -> tuple[int, str]:
    _, leaving = WAYS_TO_LEAVE[way]
    script = LEFT.replace("MODE", mode).replace("LEAVE", leaving).replace("OPTIONS", options).replace("LET_GO", let_go)
    return run(QUIET + script, folder)


@pytest.mark.parametrize("way", WAYS_TO_LEAVE)
def test_a_run_that_leaves_without_closing_ends_its_save_first(tmp_path: Path, way: str) -> None:
    # What is registered last is called first.
    code, printed = leave(tmp_path, way, "async_with_pinned_mem", let_go="atexit.register(in_main.set)")
    assert code == WAYS_TO_LEAVE[way][0], printed
    assert printed.count("not closed: waiting up to 60 s for the save of step 2") == 1, printed
    steps = [path.name for path in (tmp_path / "run" / "checkpoint").iterdir()]
    assert sorted(steps) == ["step-1", "step-2", "writer.lock"], printed


def test_at_the_exit_a_save_is_waited_for_no_longer_than_the_grace_period(tmp_path: Path) -> None:
    code, printed = leave(tmp_path, "sys.exit", "async", "preemption_grace_seconds=1")
    assert code == 7
    assert "Step 2 is not saved: its save had not ended after 1 s" in printed, printed


ALONE = """
import logging
import torch.distributed as dist
from torchtitan_lite.log import logger, setup
from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.store.store import CheckpointStore
rank = int(os.environ["RANK"])
setup(0)
logger.setLevel(logging.WARNING)
dist.init_process_group("gloo", init_method=f"file://{Path('rendezvous').absolute()}", rank=rank, world_size=2)

class Dying(Durable):
    def create(self, path):
        if rank == 1 and "step-2" in str(path):  # At the first step the ranks still make their groups.
            os.kill(os.getpid(), signal.SIGKILL)
        return super().create(path)

run = start("async", seams={"store": CheckpointStore(Path("run/checkpoint"), durable=Dying())})
run.step()
run.step()
sys.exit(7)
"""


def test_a_peer_that_is_gone_is_one_line_at_the_exit(tmp_path: Path) -> None:
    logs = [tmp_path / f"rank{rank}.log" for rank in range(2)]
    environments = [{**os.environ, "RANK": str(rank)} for rank in range(2)]
    ranks = [run_code(QUIET + ALONE, *each, tmp_path) for each in zip(logs, environments, strict=True)]
    assert [rank.wait(DEADLINE_SECONDS) for rank in ranks] == [7, -9]
    lines = [line for line in logs[0].read_text().splitlines() if "[Gloo]" not in line]
    assert ["not closed" in lines[0], "Step 2 is not saved: " in lines[1], len(lines)] == [True, True, 2], lines
