"""The start of a keeper: a new interpreter that has nothing of the process that starts it."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_lite.errors import KeeperUnavailable
from torchtitan_lite.memory.keeper import messages

START_SECONDS = 30.0
"""How long a keeper may take to start, which is 0.1 s on an idle host."""
KILL_SECONDS = 30.0
"""How long one that was killed may take to end, which is less than 0.1 s."""


def refuse_system() -> None:
    """Raise `KeeperUnavailable` if this system has not what a keeper needs."""
    if not sys.executable:
        raise KeeperUnavailable("sys.executable is empty, so no Python is known to start the keeper with")
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("torchtitan_lite-probe", os.MFD_CLOEXEC))
    except (OSError, AttributeError) as error:  # The second: this Python was built without them.
        raise KeeperUnavailable(f"this system refuses memfd_create or pidfd_open: {error}") from error


def spawn(path: Path, ttl_seconds: float) -> None:
    """Start a keeper that listens at `path`; return when it does."""
    root = str(Path(__file__).resolve().parents[3])
    code = f"import sys; sys.path.append({root!r}); from torchtitan_lite.memory.keeper.process import main; "
    # Without site-packages: a third of the time and of the memory. The session is its own, so that no signal to the
    # group of the trainer reaches it, and it has no child of the trainer as its parent for long.
    command = [sys.executable, "-I", "-S", "-c", f"{code}main({str(path)!r}, {float(ttl_seconds)!r})"]
    # Not subprocess: it waits for the end of a pipe. A worker that another thread forks meanwhile, of a data loader for
    # one, has that pipe open as long as it lives.
    report = os.memfd_create("torchtitan_lite-report", os.MFD_CLOEXEC)
    try:
        streams: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in (0, 1)]
        streams.append((os.POSIX_SPAWN_DUP2, report, 2))
        pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=streams, setsid=True)
        exit_code = _exit_code(pid)
        finding = os.pread(report, 1 << 16, 0).decode(errors="replace").strip().rpartition("\n")[2]
    finally:
        os.close(report)
    if exit_code:
        raise KeeperUnavailable(f"the keeper did not start: {finding or f'exit code {exit_code}':.200}")


def _exit_code(pid: int) -> int:
    """Return the exit code of the child `pid`. Raises TimeoutError, and ends the child, if it takes too long."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return 0  # SIGCHLD is ignored here, so the system keeps no exit codes.
    try:
        has_ended = messages.has_ended(pidfd, START_SECONDS)
        if not has_ended:
            os.kill(pid, signal.SIGKILL)
            # It may hang in the system: then it is left behind.
            messages.has_ended(pidfd, KILL_SECONDS)
        exit_code = 0
        with suppress(ChildProcessError):
            exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, os.WNOHANG)[1])
    finally:
        os.close(pidfd)
    if not has_ended:
        raise TimeoutError
    return exit_code
