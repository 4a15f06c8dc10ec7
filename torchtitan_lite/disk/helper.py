"""Helper processes: each works for the process that starts it, and dies with it.

A helper needs neither torch nor the user's main module, so it starts in moments. It ignores the signals that a
scheduler sends to process groups, because its trainer decides when to end. The two talk over lines: messages that
pickle, with descriptors. `Helper` is the end of the trainer, which can start the process again; `begin` is what the
process does first. There is one for each kind of work, so that a hung network fails no write, and a slow store no save.
That it has ended shows at once, by the line; that it is stopped (SIGSTOP, a debugger), whoever waits for it has to look
up.
"""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_lite.disk.forks import forget_in_children
from torchtitan_lite.disk.threads import daemon
from torchtitan_lite.log import logger

IGNORED_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
"""What a scheduler or a launcher sends to process groups, besides the signals that the trainer itself handles."""
POLL_SECONDS = 0.5
"""Between two checks whether a process is stopped, while an answer of it is waited for."""
KILL_SECONDS = 10.0
"""How long a process that was killed may take to end before it is left behind."""
_HEAD = struct.Struct("<Q")
"""The length of a message."""
_MOST_FDS = 8


class HelperLost(Exception):
    """The process ended, is stopped, or was silent for too long. The message says which."""


class Line:
    """One end of a connection between a trainer and its helper. Any thread; one sends and one receives at a time.

    Raises EOFError when the other end has hung up, and OSError.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.RLock()
        self.turn = threading.RLock()
        """Held by a thread that receives. One that waits for an answer holds it before it asks."""
        self._data, self._fds = b"", list[int]()
        """Of the message that arrives."""

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._end.fileno()

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Send `message` with duplicates of `fds`."""
        data = pickle.dumps(message)
        data = _HEAD.pack(len(data)) + data
        with self._sending:
            sent = socket.send_fds(self._end, [data], fds)
            self._end.sendall(memoryview(data)[sent:])

    def receive(self) -> Any:
        """Return the next message, which has no descriptors."""
        return self.receive_with_fds()[0]

    def receive_with_fds(self) -> tuple[Any, list[int]]:
        """Return the next message and its descriptors, which the caller owns. Nothing of a later one is read."""
        with self.turn:
            while missing := self._missing():
                self._receive_part(missing)
            data, fds = self._data, self._fds
            self._data, self._fds = b"", []
        return pickle.loads(memoryview(data)[_HEAD.size :]), fds

    def answer(self, message: object, fds: Sequence[int], pid: int, seconds: float) -> Any:
        """Send `message` to the process `pid`; return its next one. Raises `HelperLost`.

        At once if the process has ended, within `POLL_SECONDS` if it is stopped, else after `seconds`.
        """
        deadline = time.monotonic() + seconds
        with self.turn:
            try:
                self.send(message, fds)
                while missing := self._missing():  # It may be stopped amid its answer.
                    while not self.is_ready(POLL_SECONDS):
                        if is_stopped(pid):
                            raise HelperLost("was stopped")
                        if time.monotonic() > deadline:
                            raise HelperLost(f"was silent for {seconds:.0f} s")
                    self._receive_part(missing)
                return self.receive()
            except (EOFError, OSError) as error:
                raise HelperLost(f"ended ({type(error).__name__})") from error

    def is_ready(self, seconds: float = 0.0) -> bool:
        """Return whether there is something to receive, or the end, now or within `seconds`."""
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def hang_up(self) -> None:
        """Close the connection, also for forked children that have a copy of this end. Idempotent."""
        with suppress(OSError):  # The other end has hung up.
            # Not only closed: the copy of a forked child would keep the connection open.
            self._end.shutdown(socket.SHUT_RDWR)
        with self.turn, self._sending:  # What was under way in another thread has failed by now.
            self._end.close()

    def forget(self) -> None:
        """Close the descriptor in a forked child; the parent's connection stays."""
        self._end.close()

    def _missing(self) -> int:
        """Return how many bytes to receive next: of the head of the message, then of the rest."""
        whole = _HEAD.size
        if len(self._data) >= whole:
            whole += _HEAD.unpack_from(self._data)[0]
        return whole - len(self._data)

    def _receive_part(self, num_bytes: int) -> None:
        part, fds, _, _ = socket.recv_fds(self._end, num_bytes, _MOST_FDS)
        if not part:
            raise EOFError
        self._data += part
        self._fds += fds


class Helper:
    """The trainer's end of a helper, which is started when a subclass calls `_start`.

    The process runs `serve` of `module`, which gets the job, the lines and the descriptors. A line takes a message
    within `send_seconds`, or raises OSError: a process that is stopped reads nothing. `name` is for people.
    """

    def __init__(
        self, name: str, module: str, ignored_signals: Sequence[str], *, num_lines: int = 1, send_seconds: float = 1.0
    ) -> None:
        self._name, self._module, self._num_lines = name, module, num_lines
        self._send_seconds = math.ceil(send_seconds)
        known = {*IGNORED_SIGNALS, *ignored_signals} & signal.Signals.__members__.keys()
        self._ignored = sorted(int(signal.Signals[each]) for each in known)
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: tuple[Line, ...] = ()
        """Empty while no process runs, as far as this end knows."""
        self._listener: threading.Thread | None = None
        forget_in_children(self.forget)

    @property
    def pid(self) -> int | None:
        """Return the process id; None while no process lives."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def end(self, seconds: float = 0.0) -> int | None:
        """Hang up, and kill the process unless it ends within `seconds`; at once if it is stopped. Idempotent.

        Return its pid if it was killed; else None. It can be started again.
        """
        lines, self._lines = self._lines, ()
        for line in lines:
            line.hang_up()
        process, self._process = self._process, None
        killed = None if process is None else self._killed(process, seconds)
        listener, self._listener = self._listener, None
        # A collection of garbage may call this in the listener itself.
        if listener is not None and listener is not threading.current_thread():
            listener.join(KILL_SECONDS)
        return killed

    def forget(self) -> None:
        """Drop the process in a forked child; the parent's stays."""
        for line in self._lines:
            line.forget()
        self._lines = ()
        if self._process is not None:
            # Else Popen would wait for a process that is no child of this one.
            self._process.returncode = 0
            self._process = None

    def _start(self, job: object, fds: Sequence[int] = ()) -> None:
        """Start a process, with duplicates of `fds`, after the end of the one before; do not wait for it.

        Main thread only: the process dies with the thread that started it. Raises OSError.
        """
        pairs = [socket.socketpair() for _ in range(self._num_lines)]
        for ours, _ in pairs:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", self._send_seconds, 0))
        lines = tuple(Line(ours) for ours, _ in pairs)
        line_fds = [theirs.fileno() for _, theirs in pairs]
        call = f"serve(*begin({os.getpid()}, {self._ignored}, {line_fds}), {[*fds]})"
        try:
            lines[0].send(job)
            self._process = _spawn(self._module, call, [*line_fds, *fds], self._ignored)
        except BaseException:
            for line in lines:
                line.hang_up()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        self._lines = lines

    def _listen(self) -> None:
        """Have a thread call `_heard` with each message of the process, and `_ended` after the last one.

        Raises OSError if the system has no more threads; the process is ended then.
        """
        try:
            self._listener = daemon(self._name.lower(), self._hear_all, self._lines[0])
        except OSError:
            self.end()
            raise

    def _hear_all(self, line: Line) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._heard(line.receive())
        line.hang_up()
        has_died = line in self._lines
        self._lines = () if has_died else self._lines
        self._ended(has_died=has_died)

    def _heard(self, message: Any) -> None:
        """Take a message of the process, in a thread."""

    def _ended(self, *, has_died: bool) -> None:
        """Note that there will be no more messages, in a thread; whether this end did not hang up first."""

    def _send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Send `message`. Any thread. Raises OSError."""
        if not self._lines:
            raise BrokenPipeError("no process runs")
        self._lines[0].send(message, fds)

    def _killed(self, process: subprocess.Popen[bytes], seconds: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.0 if is_stopped(process.pid) else seconds)
            return None
        process.kill()
        try:
            process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            hangs = "%s process %d hangs in a system call and cannot be killed; continuing without it"
            logger.warning(hangs, self._name, process.pid)
        return process.pid


def begin(trainer_pid: int, ignored: Sequence[int], line_fds: Sequence[int]) -> tuple[Any, list[Line]]:
    """Do what a helper does first: ignore signals, and die with the trainer. Return the job and the lines."""
    for number in ignored:
        # Ignored before they are unblocked, or one that is pending would end the process here.
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    # Looked at after `prctl`: a trainer that died before that call sends no signal.
    if os.getppid() != trainer_pid:
        os._exit(0)
    lines = [Line(socket.socket(fileno=fd)) for fd in line_fds]
    return lines[0].receive(), lines


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped the process; False if that cannot be known."""
    return state_and_start(pid)[0] in ("T", "t")


def state_and_start(pid: int) -> tuple[str, int]:
    """Return the state and the start time of the process `pid`; ("", 0) where the system does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0
    # The second field is the name, in brackets, and may contain spaces and brackets.
    fields = stat.rpartition(")")[2].split()
    return (fields[0], int(fields[19])) if len(fields) > 19 else ("", 0)


def _spawn(module: str, call: str, descriptors: Sequence[int], ignored: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a process that evaluates `call` of `serve` in `module`, and has `descriptors`."""
    # The process inherits this mask, so no signal can end it before it has set its own actions.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)
    try:
        # Not `multiprocessing`, which imports the user's main module and needs a `__main__` guard.
        imports = f"from {__name__} import begin; from {module} import serve"
        code = f"import sys; sys.path[:] = {_search_path()}; {imports}; {call}"
        return subprocess.Popen([sys.executable, "-c", code], pass_fds=descriptors)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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


class Rate:
    """Lets `bytes_per_second` of what a helper sends pass on average, without a burst after a pause; 0: any number.

    One thread at a time.
    """

    def __init__(
        self,
        bytes_per_second: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_second = bytes_per_second
        self._clock, self._sleep = clock, sleep
        self._free_at = clock()

    def wait_for(self, num_bytes: int) -> None:
        """Return when `num_bytes` more may be sent."""
        if not self._bytes_per_second:
            return
        now = self._clock()
        begin = max(now, self._free_at)
        self._free_at = begin + num_bytes / self._bytes_per_second
        if begin > now:
            self._sleep(begin - now)
