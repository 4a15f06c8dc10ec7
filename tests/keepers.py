"""Keepers in tests: none unless a test asks for it, and none is left behind."""

from __future__ import annotations

import atexit
import os
import select
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from torchtitan_lite.memory.keeper.client import Keeper

_IN_MEMORY = Path("/dev/shm")
END_SECONDS = 30.0
"""How long a keeper may take to end on a busy machine."""
OFF: dict[str, str] = {}
"""The variables of `turn_off`: ranks that a test with `memory_tier` is the first to need are started with them."""


def turn_off() -> None:
    """Turn the memory tier off for this process and those that it starts; what looks for a keeper finds none."""
    folder = _new_folder()
    atexit.register(_remove_in, os.getpid(), folder)
    OFF.update(TORCHTITAN_LITE_MEMORY="off", XDG_RUNTIME_DIR=str(folder))
    os.environ.update(OFF)


@pytest.fixture
def memory_tier() -> Iterator[Path]:
    """Turn the memory tier on, in this process and in jobs that it starts; the keepers end with the test.

    It is the folder of their sockets. Ranks of `two_ranks` have it off: set both variables in them.
    """
    with tier() as folder:
        yield folder


@contextmanager
def tier() -> Iterator[Path]:
    """Do for the block what `memory_tier` does for a test."""
    folder = _new_folder()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCHTITAN_LITE_MEMORY", raising=False)
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        try:
            yield folder
        finally:
            left = keepers_in(folder)
            shutil.rmtree(folder, ignore_errors=True)  # A keeper ends when its socket is removed.
            for pid in left:
                assert has_ended(pid), f"the keeper {pid} has not ended without its socket"


def keepers_in(folder: Path) -> list[int]:
    """Return the pids of the keepers whose sockets are in `folder`."""
    wanted = os.fsencode(f"main('{folder}/")
    return [
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal() and wanted in _command(entry)
    ]


def names_at(keeper: Keeper) -> list[str]:
    """Return the names of what `keeper` holds."""
    held = keeper.held()
    for each in held:
        each.close()
    return sorted(each.name for each in held)


def has_one_keeper_at_most(folder: Path) -> bool:
    """Return whether at most one keeper is left in `folder`, once one that is being started has its process to itself.

    A start that is killed meanwhile leaves the processes that fork it for a moment, which end one after another.
    """
    while len(keepers := keepers_in(folder)) > 1:
        if not any(map(has_ended, keepers)):
            return False
    return True


def processes_of(folder: Path) -> list[int]:
    """Return the pids of all processes that were started with `folder` for the sockets of keepers, and still live.

    This one and its children are left out: a server that forks stays alive.
    """
    variable = b"XDG_RUNTIME_DIR=" + os.fsencode(folder)
    found = set(keepers_in(folder))
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # It has ended, or is another user's.
            if entry.name.isdecimal() and variable in (entry / "environ").read_bytes().split(b"\0"):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if os.getpid() not in (int(entry.name), parent):
                    found.add(int(entry.name))
    return sorted(found)


def has_ended(pid: int, seconds: float = END_SECONDS) -> bool:
    """Wait until the process `pid` has ended; return whether it has, in `seconds`."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(pidfd)


def _remove_in(pid: int, folder: Path) -> None:
    if os.getpid() == pid:  # A forked child runs exit handlers, too.
        shutil.rmtree(folder, ignore_errors=True)


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # It has ended.
        return b""


def _new_folder() -> Path:
    """Return a new folder with a short path, as an address has it."""
    return Path(tempfile.mkdtemp(prefix="ttl-", dir=_IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None))
