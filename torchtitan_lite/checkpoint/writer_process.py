"""A process that writes a rank's files, so that training shares neither interpreter nor signals with it.

It is a worker, not a peer: planning, agreement and commit stay in the trainer, which sends a path
and a list of items that lie in a staging arena both have mapped, and gets back where each item was
written. So it needs no process group and no rank. It ignores the signals that a scheduler sends to
whole process groups (the trainer decides what is saved and when to end), and it dies with its
trainer: an orphan must not write into a folder that a restarted job owns. `WriterProcess` is the
trainer's end, `serve` the process's.
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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from torchtitan_lite.checkpoint.staging import ArenaSlice, StagingArena, tensor_in
from torchtitan_lite.checkpoint.writer import write_items
from torchtitan_lite.errors import WriterProcessDied
from torchtitan_lite.log import logger

IGNORED_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
"""What a scheduler or a launcher sends to process groups, besides what the trainer itself leaves for."""
POLL_SECONDS = 0.5
"""How often a wait looks whether the process still lives (an end is seen at once, by its closed socket)."""
STOP_SECONDS = 10.0
"""How long an idle process may take to end after being asked; then it is killed."""


@dataclass(frozen=True)
class UseArena:
    """The next message carries the descriptor of an arena of `num_bytes`; it replaces the one before."""

    num_bytes: int


@dataclass(frozen=True)
class Write:
    """Write `items` to a new file at `path` and sync it."""

    path: Path
    items: list[tuple[MetadataIndex, ArenaSlice | bytes]]


class WriterProcess:
    """The trainer's end. Not thread-safe: one save at a time talks to it."""

    def __init__(self, timeout_seconds: float, ignored_signals: Sequence[str] = ()) -> None:
        self._timeout_seconds = timeout_seconds
        names = {*IGNORED_SIGNALS, *ignored_signals}
        self._ignored = sorted(int(signal.Signals[name]) for name in names if name in signal.Signals.__members__)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._arena: StagingArena | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None while there is none."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Starts the process unless it is there; does not wait for it. Main thread: it dies with the calling thread."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        ours, theirs = socket.socketpair()
        # A process that is stopped reads nothing: sending to it must come to an end, too.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", math.ceil(self._timeout_seconds), 0))
        with theirs:
            # The process inherits this mask, so that no signal finds it before it has set its own actions.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, self._ignored)
            try:
                self._process = subprocess.Popen(_command(theirs.fileno(), self._ignored), pass_fds=[theirs.fileno()])
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._connection = Connection(ours.detach())
        self._arena = None

    def write(
        self, path: Path, items: list[tuple[MetadataIndex, ArenaSlice | bytes]], arena: StagingArena
    ) -> list[WriteResult]:
        """Has `items` of `arena` written to `path`, durably. Raises what writing raised, or `WriterProcessDied`."""
        doing = f"writing {path}"
        if self._connection is None:
            raise WriterProcessDied(0, doing, "was not started")
        try:
            self._share(arena)
            self._connection.send(Write(path, items))
            answer = self._receive(doing)
        except (EOFError, OSError) as error:
            raise self._died(doing, f"ended ({type(error).__name__})") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Ends the process, at the latest by killing it. Idempotent; nothing may be under way."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                logger.warning(
                    "Writer process %d did not end within %.0f s; killing it.", self._process.pid, STOP_SECONDS
                )
                self._process.kill()
                self._process.wait()
            self._process = None

    def _share(self, arena: StagingArena) -> None:
        assert self._connection is not None
        if arena is not self._arena:
            self._connection.send(UseArena(arena.num_bytes))
            send_handle(self._connection, arena.fd, self.pid)
            self._arena = arena

    def _receive(self, doing: str) -> list[WriteResult] | Exception:
        assert self._connection is not None
        deadline = time.monotonic() + self._timeout_seconds
        while not self._connection.poll(POLL_SECONDS):
            if time.monotonic() > deadline:
                raise self._died(doing, f"was silent for {self._timeout_seconds:.0f} s")
        answer: list[WriteResult] | Exception = self._connection.recv()
        return answer

    def _died(self, doing: str, finding: str) -> WriterProcessDied:
        assert self._process is not None
        pid = self._process.pid
        self._process.kill()
        self.close()
        return WriterProcessDied(pid, doing, finding)


def serve(socket_fd: int, trainer_pid: int, ignored: Sequence[int]) -> None:
    """The process: writes what it is asked to until the trainer closes the socket or dies."""
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)
    _die_with(trainer_pid)
    torch.set_num_threads(1)
    memory: mmap.mmap | None = None
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


def _write(job: Write, memory: mmap.mmap | None) -> list[WriteResult] | Exception:
    items: list[tuple[MetadataIndex, torch.Tensor | bytes]] = []
    for index, data in job.items:
        if isinstance(data, ArenaSlice):
            assert memory is not None
            items.append((index, tensor_in(memory, data)))
        else:
            items.append((index, data))
    try:
        return write_items(job.path, items)
    except Exception as error:
        return error


def _map(fd: int, num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, max(num_bytes, 1))
    finally:
        os.close(fd)


def _die_with(trainer_pid: int) -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != trainer_pid:
        os._exit(0)


def _command(socket_fd: int, ignored: Sequence[int]) -> list[str]:
    # Not `-m`: the package may have been found through sys.path, which a new interpreter does not share.
    root = str(Path(__file__).resolve().parents[2])
    call = f"serve({socket_fd}, {os.getpid()}, {list(ignored)})"
    code = f"import sys; sys.path.insert(0, {root!r}); from {__name__} import serve; {call}"
    return [sys.executable, "-c", code]
