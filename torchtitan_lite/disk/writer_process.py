"""A process that writes the files of a rank, so that training shares neither interpreter nor signals with it.

It is a worker, not a peer: planning, agreement and commit stay in the trainer. The trainer sends the handle
of a file and the length of its image in the staging arena, which both processes map; the process answers with digests.
So it needs no process group, no rank and no torch, and starts in moments. A thread of its own digests copies that no
disk write needs, so that these wait for no disk. It gives way to training (nice, lowest I/O priority). It ignores the
signals that a scheduler sends to process groups, because the trainer decides what to save and when to end. It dies with
its trainer, because an orphan must not write into a folder that a restarted job owns.
`WriterProcess` is the end of the trainer, `serve` the end of the process.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from torchtitan_lite import faults, log
from torchtitan_lite.disk import child_process
from torchtitan_lite.disk.background import give_way
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.forks import forget_in_children
from torchtitan_lite.disk.new_file import NewFile
from torchtitan_lite.disk.writer_line import Arena, DigestRequest, Line, LineBroken, Write, answer_all
from torchtitan_lite.errors import WriterProcessDied

STOP_SECONDS = 10.0
"""How long an idle process may take to end by itself before it is killed."""


class WriterProcess:
    """The trainer's end. One write at a time uses it, and at the same time one digest, each from any thread."""

    def __init__(self, timeout_seconds: float, ignored_signals: Sequence[str] = (), *, rank: int = 0) -> None:
        self._timeout_seconds = timeout_seconds
        self._ignored = child_process.numbers_of(ignored_signals)
        self._rank = rank
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: tuple[Line, Line] | None = None
        self._lock = threading.Lock()
        self._is_reported = False
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
            if not self._is_reported:
                log.logger.warning("Writer process %d %s; starting another one", self._process.pid, finding)
            self._process.kill()
        self.close()
        lines = Line(self._timeout_seconds), Line(self._timeout_seconds)
        with lines[0].theirs as writes, lines[1].theirs as digests:
            sockets = [writes.fileno(), digests.fileno()]
            call = f"serve({sockets}, {os.getpid()}, {self._ignored}, {self._rank}, {faults.installed()!r})"
            # Not DCP's own background process: signals to the process group end it, it may outlive its trainer, and one
            # rank alone cannot restart it.
            self._process = child_process.start(__name__, call, sockets, self._ignored)
        self._lines, self._is_reported = lines, False

    def write(
        self, new: NewFile, arena: Arena, num_bytes: int, step: int, record: FileRecord | None = None
    ) -> FileRecord:
        """Write the first `num_bytes` of `arena` to `new`, durably; return the record of the file.

        `record` is that record if it is known; else the process takes the digests.
        Raises the error of the write, or `WriterProcessDied`: at once if the process ended, within a second if it was
        stopped.
        """
        return self._ask(0, lambda number: Write(number, new, num_bytes, step, record), arena, f"writing {new}")

    def digest(self, arena: Arena, num_bytes: int, step: int) -> FileRecord:
        """Return the record of a file that is the first `num_bytes` of `arena`. Raises `WriterProcessDied`."""
        return self._ask(1, lambda number: DigestRequest(number, num_bytes, step), arena, f"digesting step {step}")

    def close(self) -> None:
        """End the process, by killing it after `STOP_SECONDS`. Idempotent; no write may be under way."""
        self._hang_up()
        if self._process is not None:
            try:
                self._process.wait(0 if _is_stopped(self._process.pid) else STOP_SECONDS)
            except subprocess.TimeoutExpired:
                log.logger.warning("Writer process %d did not end by itself; killing it", self._process.pid)
                self._process.kill()
                _wait_for_killed(self._process)
            self._process = None

    def forget(self) -> None:
        """Drop the process in a forked child; the parent's process stays."""
        for line in self._lines or ():
            line.forget()
        self._lines = None
        if self._process is not None:
            # Else Popen would wait for a process that is no child of this one.
            self._process.returncode = 0
            self._process = None

    def _hang_up(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, None
        for line in lines or ():
            line.hang_up()

    def _ask(self, which: int, request: Callable[[int], Write | DigestRequest], arena: Arena, doing: str) -> FileRecord:
        lines, process = self._lines, self._process
        if lines is None or process is None:
            raise WriterProcessDied(0, doing, "was not started")
        try:
            answer = lines[which].ask(request, arena, process.pid, _is_stopped)
        except LineBroken as broken:
            # The next `start` starts another one; until then the other line finds it ended, too.
            process.kill()
            self._is_reported = True
            self._hang_up()
            _wait_for_killed(process)
            raise WriterProcessDied(process.pid, doing, str(broken)) from broken
        if isinstance(answer, Exception):
            raise answer
        return answer


def serve(socket_fds: Sequence[int], trainer_pid: int, ignored: Sequence[int], rank: int, fault_spec: str) -> None:
    """Serve requests, in the process, until the trainer closes the socket of writes or dies."""
    child_process.begin(trainer_pid, ignored)
    # Before the first thread, because threads inherit the priority.
    give_way()
    log.setup(rank)
    faults.install(fault_spec, rank=rank, process="writer")
    writes, digests = socket_fds
    threading.Thread(target=answer_all, args=(digests,), name="digests", daemon=True).start()
    answer_all(writes)


def _wait_for_killed(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        log.logger.warning("Writer process %d hangs in the system; leaving it behind", process.pid)


def _is_stopped(pid: int) -> bool:
    """Return whether the process is stopped (SIGSTOP, a debugger)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in "Tt"
