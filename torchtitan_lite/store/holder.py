"""The job that holds a folder, as its lock file says.

A process is identified by its pid space (boot id and pid namespace; the host's name where the system does not say), its
pid, and its start time. For a process of our own pid space it is certain whether it has ended; for any other, only
whether its file still changes. All lock files of one holder have the same length and differ only in the numbers at the
end, so a reader who sees half of an old one and half of a new one still reads the right holder.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.disk.helper import state_and_start
from torchtitan_lite.host_memory import host_id

_LATEST = 253402300800
"""Unix seconds of the year 10000, from which on there is no date."""


@dataclass(frozen=True)
class Holder:
    """One job that took a folder, once; no two have the same `token`."""

    token: str
    run_id: str
    host: str
    space: str
    pid: int
    started: int
    """Start time of the process, in the kernel's ticks since boot; 0 where unknown."""
    since: int
    """When it took the folder, in Unix seconds."""

    @classmethod
    def this_process(cls, run_id: str, since: float) -> Holder:
        """Return this process as a holder, with a new token."""
        pid = os.getpid()
        return cls(uuid.uuid4().hex, run_id, platform.node(), _space(), pid, state_and_start(pid)[1], int(since))

    @classmethod
    def parse(cls, data: bytes) -> Holder | None:
        """Return the holder that the contents `data` of a lock file name; None if they are cut or not ours."""
        try:
            document = json.loads(data)
            holder = cls(**{field.name: document[field.name] for field in dataclasses.fields(cls)})
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return holder if holder._is_sound() else None

    def to_bytes(self, beat: int, at: float) -> bytes:
        """Return the contents of the lock file at heartbeat number `beat`, at Unix second `at`."""
        return f'{json.dumps(dataclasses.asdict(self))[:-1]}, "beat": {beat:12d}, "at": {int(at):12d}}}\n'.encode()

    def has_ended(self) -> bool:
        """Return whether the process was of our own pid space and is gone; False where that is unknown."""
        return self.space == _space() and not _is_running(self.pid, self.started)

    def is_same_process_as(self, other: Holder) -> bool:
        """Return whether both are of the same process."""
        return (self.space, self.pid, self.started) == (other.space, other.pid, other.started)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.since))
        return f"run {self.run_id} (process {self.pid} on {self.host}, since {since} UTC)"

    def _is_sound(self) -> bool:
        texts = (self.token, self.run_id, self.host, self.space)
        numbers = ((self.pid, 1, 2**31), (self.started, 0, 2**63), (self.since, 0, _LATEST))
        return all(type(text) is str for text in texts) and all(
            type(number) is int and low <= number < high for number, low, high in numbers
        )


@dataclass(frozen=True)
class HolderSeen:
    """The job in the lock of a folder, as another process sees it."""

    holder: Holder | None
    """None if the lock cannot be read."""
    at: float
    """When it last showed that it lives, in Unix seconds; NaN if that is unknown."""

    @classmethod
    def parse(cls, data: bytes) -> HolderSeen:
        """Return what the contents `data` of a lock file show."""
        holder = Holder.parse(data)
        at = 0 if holder is None else json.loads(data).get("at")
        return cls(holder, at if type(at) is int and 0 <= at < _LATEST else math.nan)


def _space() -> str:
    """Return the space in which a pid names one process at a time."""
    try:
        return f"{host_id()} {Path('/proc/self/ns/pid').readlink()}"
    except (OSError, ValueError):
        return platform.node()


def _is_running(pid: int, started: int) -> bool:
    """Return whether the process `pid` of our pid space, started at `started`, still runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # Another user's process. It exists, although /proc may hide it.
    state, start = state_and_start(pid)
    # A zombie (Z, X), killed and not waited for yet, counts as gone: it runs nothing any more.
    return state not in ("Z", "X") and (0 in (start, started) or start == started)
