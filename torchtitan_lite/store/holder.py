"""The job that holds a folder, as its lock file tells.

A process is known by its pid space (a boot of a kernel and a pid namespace, the host's name where
the system does not say), its pid and the moment it started: of a process of our own space it can be
told for certain that it has ended, of any other only that its file still changes. Every file of one
holder has the same length, and only the figures at its end differ, so that a reader who sees half
of an old one and half of a new one still reads who it is.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

_LATEST = 253402300800
"""Year 10000, from which on a moment has no date."""


@dataclass(frozen=True)
class Holder:
    """One taking of a folder; `token` is its alone."""

    token: str
    run_id: str
    host: str
    space: str
    pid: int
    started: int
    """When the process started, in the kernel's ticks since it booted; 0 where that is not known."""
    since: int
    """When it took the folder, in Unix seconds."""

    @classmethod
    def this_process(cls, run_id: str, since: float) -> Holder:
        """This process, with a new token."""
        pid = os.getpid()
        return cls(uuid.uuid4().hex, run_id, platform.node(), _space(), pid, _state_and_start(pid)[1], int(since))

    @classmethod
    def parse(cls, data: bytes) -> Holder | None:
        """Whom a lock file that holds `data` names; None where it was cut in the middle, or is none of ours."""
        try:
            document = json.loads(data)
            holder = cls(**{field.name: document[field.name] for field in dataclasses.fields(cls)})
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return holder if holder._is_sound() else None

    def to_bytes(self, beat: int, at: float) -> bytes:
        """The lock file of this holder at its `beat`-th sign of life, at Unix second `at`."""
        return f'{json.dumps(dataclasses.asdict(self))[:-1]}, "beat": {beat:12d}, "at": {int(at):12d}}}\n'.encode()

    def has_ended(self) -> bool:
        """Whether it was a process of our own pid space and is gone; False where that cannot be told."""
        return self.space == _space() and not _is_running(self.pid, self.started)

    def is_same_process_as(self, other: Holder) -> bool:
        """Whether both are takings by one process."""
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


def _space() -> str:
    """The space in which a pid names one process at a time."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except (OSError, ValueError):
        return platform.node()


def _is_running(pid: int, started: int) -> bool:
    """Whether the process `pid` of our space that started at `started` can still do anything."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # Another user's; /proc may hide it, so its absence there would prove nothing.
    state, start = _state_and_start(pid)
    # Killed and not waited for yet (Z, X) is gone too: nothing of it runs any more.
    return state not in ("Z", "X") and (0 in (start, started) or start == started)


def _state_and_start(pid: int) -> tuple[str, int]:
    """The state and the start time of the process `pid`; ("", 0) where the system does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0
    # The second field is the name, in brackets, and may hold spaces and brackets.
    fields = stat.rpartition(")")[2].split()
    return (fields[0], int(fields[19])) if len(fields) > 19 else ("", 0)
