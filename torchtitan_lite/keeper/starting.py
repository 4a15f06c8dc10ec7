"""The start of a keeper: a new interpreter that has nothing of the process that starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from torchtitan_lite.errors import KeeperUnavailable

START_SECONDS = 30.0
"""How long a keeper may take to start, which is 0.1 s on an idle host."""


def refuse_system() -> None:
    """Raise `KeeperUnavailable` if this system has not what a keeper needs."""
    for needed, what in (("memfd_create", "memory without a file"), ("pidfd_open", "descriptors of processes")):
        if not hasattr(os, needed):
            raise KeeperUnavailable(f"this system has no {what} ({needed})")
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("torchtitan_lite-probe", os.MFD_CLOEXEC))
    except OSError as error:
        raise KeeperUnavailable(f"this system refuses memfd_create or pidfd_open: {error.strerror}") from error


def spawn(path: Path, ttl_seconds: float) -> None:
    """Start a keeper that listens at `path`; return when it does."""
    root = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.append({root!r}); from torchtitan_lite.keeper.process import main; "
    # Without site-packages: a third of the time and of the memory. The session is its own, so that no signal to the
    # group of the trainer reaches it, and it has no child of the trainer as its parent for long.
    command = [sys.executable, "-I", "-S", "-c", f"{code}main({str(path)!r}, {float(ttl_seconds)!r})"]
    null = subprocess.DEVNULL
    with subprocess.Popen(
        command, stdin=null, stdout=null, stderr=subprocess.PIPE, cwd="/", start_new_session=True, close_fds=True
    ) as process:
        try:
            _, report = process.communicate(timeout=START_SECONDS)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        finding = report.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {process.returncode}"
        raise KeeperUnavailable(f"it did not start: {finding:.200}")
