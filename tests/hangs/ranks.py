"""A rank of a job that only counts steps, without torch, to be run as a process: it hangs at its fourth step.

`python -m tests.hangs.ranks KIND RANK WORLD_SIZE FOLDER`; the ranks meet in the folder. A file `hold` in it keeps them,
and `hold again` in their third step. KIND may end with what befalls a helper: "+kill", "+stop" or "+slow" its writer,
from the fourth step on, "+watcher" its watcher, which is killed before the second.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from torchtitan_lite import faults, log
from torchtitan_lite.disk.block_writer import NewFileOnDisk
from torchtitan_lite.disk.helper import is_stopped
from torchtitan_lite.disk.writer_process import WriterProcess
from torchtitan_lite.errors import WriterProcessDied
from torchtitan_lite.hangs.watch import HangWatch

ROOT = Path(__file__).parents[2]
BOUND_SECONDS = 1
STEP_SECONDS = 0.05
DEADLINE_SECONDS = 60.0
BUSY_SECONDS = 1.0
WRITER_FAULTS = ("kill", "stop", "slow")

T = TypeVar("T")


class InFolder:
    """The ranks of a job, which exchange what rank 0 chooses through a file."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.rank, self.world_size = rank, world_size
        self._file = folder / "chosen.json"

    def on_coordinator(self, choose: Callable[[], T]) -> T:
        if self.rank == 0:
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps(choose()))
            os.link(new, self._file)
        _wait_while(lambda: not self._file.exists())
        chosen: T = json.loads(self._file.read_text())
        return chosen


class Writer:
    """The writer process of a rank, with the fault `kind` at its second write."""

    num_bytes = 4096

    def __init__(self, kind: str, rank: int, folder: Path) -> None:
        self.fd = os.memfd_create("arena")
        os.ftruncate(self.fd, self.num_bytes)
        self._path, self._is_endless = folder / f"written{rank}", kind == "slow"
        faults.install(f"{kind}@write:after=1,process=writer{',seconds=1000' * self._is_endless}", rank=rank)
        self._process = WriterProcess(DEADLINE_SECONDS, rank=rank)
        self._process.start()
        self._write(self._path)

    def write_again(self) -> None:
        """Begin the second write, in a thread; return once the fault has happened."""
        pid, again = self._process.pid or 0, self._path.with_suffix(".2")
        writing = threading.Thread(target=self._write, args=(again,), daemon=True)
        writing.start()
        _wait_while(lambda: writing.is_alive() and not is_stopped(pid) and not (self._is_endless and again.exists()))

    def _write(self, path: Path) -> None:
        with suppress(WriterProcessDied):
            self._process.write(NewFileOnDisk(path), self, self.num_bytes, step=4)


def start(kind: str, rank: int, world_size: int, folder: Path) -> subprocess.Popen[str]:
    """Start a rank that hangs in the way of `kind`."""
    command = [sys.executable, "-m", "tests.hangs.ranks", kind, str(rank), str(world_size), str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of a rank. Return its exit code and what it and its watcher logged."""
    _, logged = process.communicate(timeout=DEADLINE_SECONDS)
    return process.returncode, logged


def main(kind: str, rank: int, world_size: int, folder: Path) -> None:
    log.setup(rank)
    ranks = InFolder(rank, world_size, folder)
    begun = {"all ranks": 0}
    kind, _, befalls = kind.partition("+")
    around = {"events": folder / "events.jsonl", "gives_up_seconds": 100}
    with HangWatch(BOUND_SECONDS, ranks, lambda: begun, **around) as watch:
        writer = Writer(befalls, rank, folder) if befalls in WRITER_FAULTS else None
        (folder / f"began{rank}").touch()
        _wait_while((folder / "hold").exists)
        for step in range(1, 8):
            if befalls == "watcher" and step == 2:
                _kill_watcher(watch)
            watch.step(step)
            time.sleep(STEP_SECONDS)
            if step == 3:
                (folder / f"third{rank}").touch()
                with watch.paused():
                    _wait_while((folder / "hold again").exists)
            if step == 4:
                (folder / f"rank{rank}").write_text(str(os.getpid()))
                begun["all ranks"] += kind == "ahead"
                if writer is not None:
                    with watch.paused():
                        writer.write_again()
                _hang(kind, watch, folder / "late")
            begun["all ranks"] += 1


def _wait_while(condition: Callable[[], bool]) -> None:
    while condition():
        time.sleep(0.01)


def _kill_watcher(watch: HangWatch) -> None:
    os.kill(watch.pid or 0, signal.SIGKILL)
    _wait_while(lambda: not watch._needs_another)


def _hang(kind: str, watch: HangWatch, late: Path) -> None:
    match kind:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep" | "ahead":
            time.sleep(DEADLINE_SECONDS)
        case "unwatched":
            os.kill(watch.pid or 0, signal.SIGKILL)
            time.sleep(DEADLINE_SECONDS)
        case "lock":
            faults.install("lock@step", rank=0)
            faults.point("step", step=4)
        case "paused":
            with watch.paused():
                time.sleep(2.5 * BOUND_SECONDS)
        case "met late":
            with watch.paused():
                time.sleep(2.5 * BOUND_SECONDS)
            _wait_while(lambda: not late.exists())
        case "late":
            time.sleep(3.4 * BOUND_SECONDS)
            late.touch()
        case "slow":
            time.sleep(0.5 * BOUND_SECONDS)
        case "slower":
            time.sleep(2.5 * BOUND_SECONDS)
        case "busy":
            threads = [
                threading.Thread(target=_call_deep_until, args=(time.monotonic() + BUSY_SECONDS,)) for _ in "abc"
            ]
            for thread in threads:
                thread.start()
            with watch.paused():
                _call_deep_until(time.monotonic() + BUSY_SECONDS)
        case "fork":
            if not os.fork():
                sys.exit(0)
            time.sleep(DEADLINE_SECONDS)


def _call_deep_until(end: float, depth: int = 0) -> None:
    while time.monotonic() < end and depth < 50:
        _call_deep_until(end, depth + 1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
