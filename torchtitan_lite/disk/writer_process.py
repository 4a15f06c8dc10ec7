"""A process that writes the files of a rank, so that training shares neither interpreter nor signals with it.

It is a worker, not a peer: planning, agreement and commit stay in the trainer. The trainer sends a path and the length
of the file's image in the staging arena, which both processes map; the process answers with digests. So it needs no
process group, no rank and no torch, and starts in moments. It gives way to training (nice, lowest I/O priority). It
ignores the signals that a scheduler sends to whole process groups, because the trainer decides what to save and when to
end. It dies with its trainer, because an orphan must not write into a folder that a restarted job owns.
`WriterProcess` is the end of the trainer, `serve` the end of the process.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Protocol

from torchtitan_lite import faults, log
from torchtitan_lite.disk.background import give_way
from torchtitan_lite.disk.block_writer import InPlace, write_blocks
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.forks import forget_in_children
from torchtitan_lite.errors import WriterProcessDied

IGNORED_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
"""What a scheduler or a launcher sends to process groups, besides the signals that the trainer itself handles."""
POLL_SECONDS = 0.5
"""Between two checks whether the process is stopped. Its end is seen at once, by the closed socket."""
STOP_SECONDS = 10.0
"""How long an idle process may take to end by itself before it is killed."""


class Arena(Protocol):
    """Memory that both processes map."""

    fd: int
    num_bytes: int


@dataclass(frozen=True)
class UseArena:
    """Announces the descriptor of an arena of `num_bytes`, in the next message; it replaces the arena before."""

    num_bytes: int


@dataclass(frozen=True)
class Write:
    """Requests to write the first `num_bytes` of the arena to a new file at `path`, and to sync it."""

    path: Path
    num_bytes: int
    step: int


class WriterProcess:
    """The trainer's end. Not thread-safe: one save at a time uses it."""

    def __init__(self, timeout_seconds: float, ignored_signals: Sequence[str] = (), *, rank: int = 0) -> None:
        self._timeout_seconds = timeout_seconds
        names = {*IGNORED_SIGNALS, *ignored_signals}
        self._ignored = sorted(int(signal.Signals[name]) for name in names if name in signal.Signals.__members__)
        self._rank = rank
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._arena: Arena | None = None
        forget_in_children(self.forget)

    @property
    def pid(self) -> int | None:
        """Return the process id; None while there is no process."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process unless it runs; do not wait for it.

        Main thread only: the process dies with the thread that started it.
        """
        if self._process is not None:
            if self._process.poll() is None and not _is_stopped(self._process.pid):
                return
            finding = "is stopped" if self._process.poll() is None else f"ended ({self._process.returncode})"
            log.logger.warning("Writer process %d %s; starting another one", self._process.pid, finding)
            self._process.kill()
        self.close()
        ours, theirs = socket.socketpair()
        # A stopped process reads nothing: sending to it needs a time-out, too.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", math.ceil(self._timeout_seconds), 0))
        with theirs:
            # The process inherits this mask, so no signal can end it before it has set its own actions.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, self._ignored)
            try:
                command = _command(theirs.fileno(), self._ignored, self._rank)
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._connection = Connection(ours.detach())
        self._arena = None

    def write(self, path: Path, arena: Arena, num_bytes: int, step: int) -> FileRecord:
        """Write the first `num_bytes` of `arena` to `path`, durably; return the record of the file.

        Raises the error of the write, or `WriterProcessDied`: at once if the process ended, within a second if it was
        stopped.
        """
        doing = f"writing {path}"
        if self._connection is None:
            raise WriterProcessDied(0, doing, "was not started")
        try:
            self._share(arena)
            self._connection.send(Write(path, num_bytes, step))
            answer = self._receive(doing)
        except (EOFError, OSError) as error:
            raise self._died(doing, f"ended ({type(error).__name__})") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the process, by killing it after `STOP_SECONDS`. Idempotent; no write may be under way."""
        if self._connection is not None:
            _hang_up(self._connection)
            self._connection = None
        self._arena = None
        if self._process is not None:
            try:
                self._process.wait(0 if _is_stopped(self._process.pid) else STOP_SECONDS)
            except subprocess.TimeoutExpired:
                log.logger.warning("Writer process %d did not end by itself; killing it", self._process.pid)
                self._process.kill()
                self._wait_for_killed()
            self._process = None

    def forget(self) -> None:
        """Drop the process in a forked child; the parent's process goes on."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._arena = None
        if self._process is not None:
            self._process.returncode = 0  # Else Popen would wait for a process that is no child of this one.
            self._process = None

    def _wait_for_killed(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            log.logger.warning("Writer process %d hangs in the system; leaving it behind", self._process.pid)

    def _share(self, arena: Arena) -> None:
        assert self._connection is not None
        if arena is not self._arena:
            self._connection.send(UseArena(arena.num_bytes))
            send_handle(self._connection, arena.fd, self.pid)
            self._arena = arena

    def _receive(self, doing: str) -> FileRecord | Exception:
        assert self._connection is not None
        assert self._process is not None
        deadline = time.monotonic() + self._timeout_seconds
        while not self._connection.poll(POLL_SECONDS):
            if _is_stopped(self._process.pid):
                raise self._died(doing, "was stopped")
            if time.monotonic() > deadline:
                raise self._died(doing, f"was silent for {self._timeout_seconds:.0f} s")
        answer: FileRecord | Exception = self._connection.recv()
        return answer

    def _died(self, doing: str, finding: str) -> WriterProcessDied:
        assert self._process is not None
        pid = self._process.pid
        self._process.kill()
        self.close()
        return WriterProcessDied(pid, doing, finding)


def serve(socket_fd: int, trainer_pid: int, ignored: Sequence[int], rank: int, fault_spec: str) -> None:
    """Serve requests, in the process, until the trainer closes the socket or dies."""
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)
    _die_with(trainer_pid)
    give_way()
    log.setup(rank)
    faults.install(fault_spec, rank=rank, process="writer")
    memory = mmap.mmap(-1, 1)
    with Connection(socket_fd) as connection:
        while True:
            try:
                message = connection.recv()
            except (EOFError, ConnectionResetError):
                return
            if isinstance(message, UseArena):
                memory = _map(recv_handle(connection), message.num_bytes)
            else:
                connection.send(_write(message, memory))


def _write(job: Write, memory: mmap.mmap) -> FileRecord | Exception:
    faults.set_step(job.step)
    try:
        return write_blocks(job.path, InPlace(memory, job.num_bytes))
    except Exception as error:
        return error


def _map(fd: int, num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, max(num_bytes, 1))
    finally:
        os.close(fd)


def _hang_up(connection: Connection) -> None:
    """Close `connection`, also for forked children that have a copy of this end."""
    end = socket.socket(fileno=connection.fileno())
    with suppress(OSError):  # The other end is closed already.
        end.shutdown(socket.SHUT_RDWR)
    end.detach()
    connection.close()


def _die_with(trainer_pid: int) -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != trainer_pid:
        os._exit(0)


def _is_stopped(pid: int) -> bool:
    """Return whether the process is stopped (SIGSTOP, a debugger)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in "Tt"


def _command(socket_fd: int, ignored: Sequence[int], rank: int) -> list[str]:
    call = f"serve({socket_fd}, {os.getpid()}, {list(ignored)}, {rank}, {faults.installed()!r})"
    return [sys.executable, "-c", f"import sys; sys.path[:] = {_search_path()}; from {__name__} import serve; {call}"]


def _search_path() -> list[str]:
    """Return the module search path of the process: the standard library, this package, then the paths of the trainer.

    `-c` and `-m` would put the working directory first, and a file in it with the name of a standard module would end
    the process. `-P` prevents that only from Python 3.11 on.
    """
    library = Path(os.__file__).parent
    zipped = library.parent / f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    standard = [path for path in sys.path if Path(path) in (zipped, library, library / "lib-dynload")]
    # The trainer may have found the package through sys.path, which a new interpreter does not share.
    root = str(Path(__file__).resolve().parents[2])
    return list(dict.fromkeys([*standard, root, *(path for path in sys.path if Path(path).is_absolute())]))
