"""A helper that writes the files of a rank, so that training shares neither interpreter nor signals with it.

It is a worker, not a peer: planning, agreement and commit stay in the trainer. The trainer sends the handle
of a file and the length of its image in the staging arena, which both processes map; the process answers with digests.
So it needs no process group, no rank and no torch. A thread of its own, with a line of its own, digests copies that no
disk write needs, so that these wait for no disk. It gives way to training (nice, lowest I/O priority). It dies with its
trainer, because an orphan must not write into a folder that a restarted job owns.
`WriterProcess` is the end of the trainer, `serve` the end of the process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from torchtitan_lite import faults, log
from torchtitan_lite.disk.block_writer import InPlace, NewFile
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.helper import Helper, HelperLost, Line, is_stopped
from torchtitan_lite.disk.shared_memory import map_shared
from torchtitan_lite.disk.threads import give_way
from torchtitan_lite.errors import WriterProcessDied

STOP_SECONDS = 10.0
"""How long an idle process may take to end by itself before it is killed."""


class Arena(Protocol):
    """Memory that both processes map."""

    fd: int
    num_bytes: int


class Request(NamedTuple):
    """Requests the record of a file that is the first `num_bytes` of an arena."""

    num_bytes: int
    step: int
    new: NewFile | None = None
    """The file to write, durably; None to take the digests only."""
    record: FileRecord | None = None
    """What the answer is, if it is known; else the process takes the digests."""
    arena: int = 0
    """The number of the arena, whose descriptor comes with the first request about it."""
    arena_bytes: int = 0
    live: tuple[int, ...] = ()
    """The arenas that are not gone."""


class WriterProcess(Helper):
    """The trainer's end. One write at a time uses it, and at the same time one digest, each from any thread."""

    def __init__(self, timeout_seconds: float, ignored_signals: Sequence[str] = (), *, rank: int = 0) -> None:
        super().__init__("Writer", __name__, ignored_signals, num_lines=2, send_seconds=timeout_seconds)
        self._timeout_seconds = timeout_seconds
        self._rank = rank
        self._arenas: WeakKeyDictionary[Line, dict[int, Arena]] = WeakKeyDictionary()
        """Those that the other end of each line maps, by their numbers."""

    def start(self) -> None:
        """Start the process unless it runs; do not wait for it.

        Main thread only: the process dies with the thread that started it.
        """
        if (process := self._process) is not None:
            if self.pid is not None and not is_stopped(process.pid):
                return
            finding = "is stopped" if process.returncode is None else f"ended ({process.returncode})"
            log.logger.warning("Writer process %d %s; starting another one", process.pid, finding)
        self.end()
        # Not DCP's own background process: signals to the process group end it, it may outlive its trainer, and one
        # rank alone cannot restart it.
        self._start((self._rank, faults.installed()))

    def write(
        self, new: NewFile, arena: Arena, num_bytes: int, step: int, record: FileRecord | None = None
    ) -> FileRecord:
        """Write the first `num_bytes` of `arena` to `new`, durably; return the record of the file.

        `record` is that record if it is known; else the process takes the digests.
        Raises the error of the write, or `WriterProcessDied`: at once if the process ended, within a second if it was
        stopped.
        """
        return self._record(0, arena, Request(num_bytes, step, new, record), f"writing {new}")

    def digest(self, arena: Arena, num_bytes: int, step: int) -> FileRecord:
        """Return the record of a file that is the first `num_bytes` of `arena`. Raises `WriterProcessDied`."""
        return self._record(1, arena, Request(num_bytes, step), f"digesting step {step}")

    def close(self) -> None:
        """End the process, by killing it after `STOP_SECONDS`. Idempotent; no write may be under way."""
        if (killed := self.end(STOP_SECONDS)) is not None:
            log.logger.warning("Writer process %d did not end by itself; killing it", killed)

    def _record(self, which: int, arena: Arena, request: Request, doing: str) -> FileRecord:
        # In this order: never a process that is later than the lines.
        process, lines = self._process, self._lines
        if not lines or process is None:
            raise WriterProcessDied(0, doing, "was not started")
        line = lines[which]
        try:
            with line.turn:
                known = {number: each for number, each in self._arenas.get(line, {}).items() if each.fd >= 0}
                fds = [] if id(arena) in known else [arena.fd]
                self._arenas[line] = known = {**known, id(arena): arena}
                request = request._replace(arena=id(arena), arena_bytes=arena.num_bytes, live=tuple(known))
                answer: FileRecord | Exception = line.answer(request, fds, process.pid, self._timeout_seconds)
        except HelperLost as lost:
            # The next `start` starts another one; until then the other line finds it ended, too.
            if self._process is process:
                self.end()
            raise WriterProcessDied(process.pid, doing, str(lost)) from lost
        if isinstance(answer, Exception):
            raise answer
        return answer


def serve(job: tuple[int, str], lines: Sequence[Line], fds: Sequence[int]) -> None:
    """Serve requests, in the process, until the trainer hangs up or dies; `job` is the rank and its faults."""
    # Before the first thread, because threads inherit the priority.
    give_way()
    rank, fault_spec = job
    log.setup(rank)
    faults.install(fault_spec, rank=rank, process="writer")
    writes, digests = lines
    threading.Thread(target=_answer_all, args=(digests,), name="digests", daemon=True).start()
    _answer_all(writes)


def _answer_all(line: Line) -> None:
    arenas: dict[int, memoryview] = {}
    while True:
        try:
            request, fds = line.receive_with_fds()
            for number in arenas.keys() - {*request.live}:
                del arenas[number]
            for fd in fds:
                arenas[request.arena] = _mapped(fd, request.arena_bytes)
            line.send(_answer(request, arenas[request.arena]))
        except (EOFError, ConnectionError):
            return


def _answer(request: Request, memory: memoryview) -> FileRecord | Exception:
    try:
        if request.new is None:
            faults.point("digest", step=request.step)
            return FileRecord.of(memory[: request.num_bytes])
        faults.set_step(request.step)
        return request.new.write(InPlace(memory, request.num_bytes, request.record))
    except Exception as error:
        return error


def _mapped(fd: int, num_bytes: int) -> memoryview:
    try:
        return map_shared(fd, num_bytes)
    finally:
        os.close(fd)
