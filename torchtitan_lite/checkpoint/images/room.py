"""How much memory this process may still take, and for how many arenas that is enough.

A process is killed when a cgroup above it is full, which MemAvailable does not show, so the least of all limits counts.
Pages of files count as free: the kernel drops them first. Between two steps a process has less than at its peak within
them: the difference is reserved. Pure functions of texts, and readers of /proc and /sys.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

# One holds the image that all ranks have, one is being written or digested, and one is for the next copy.
MAX_ARENAS = 3
_USED = 0.8
"""The part of the free memory that arenas may take: what else grows takes the rest."""
_GROWTH = 0.5
"""The part of its own peak by which a process may still grow: the first step, after which the ranks look, is not yet
the last peak. By hand, a small model on a CPU grew from 0.56 to 0.87 GiB in its second step.
"""
_V1_UNLIMITED = 1 << 60
"""cgroup v1 says a number of about 2^63 for no limit."""


class Room(NamedTuple):
    """What a rank knows of the memory of its host."""

    host: str
    arena_bytes: int
    """Of one arena; negative if unknown."""
    have_bytes: int
    """Of the arenas that it has."""
    free_bytes: int
    reserve_bytes: int = 0
    """What training takes of that, at its peak."""
    oom_kills: int = 0
    """The processes that were killed because the cgroup of the job was full."""


def num_arenas(ranks: Sequence[Room]) -> int:
    """Return how many arenas of its size each rank can have, at most `MAX_ARENAS`; less than 2 is not enough.

    Each process that was killed for memory makes it one less: the job may have been the one that did not fit.
    """
    if any(rank.arena_bytes < 0 for rank in ranks):
        return 0
    most = MAX_ARENAS - max((rank.oom_kills for rank in ranks), default=0)
    return next((number for number in range(most, 0, -1) if _fits(ranks, number)), 0)


def _fits(ranks: Sequence[Room], number: int) -> bool:
    for host in {rank.host for rank in ranks}:
        here = [rank for rank in ranks if rank.host == host]
        needed = sum(max(0, number * rank.arena_bytes - rank.have_bytes) for rank in here)
        # What is free between two steps is more than what training leaves free at its peak.
        free = min(rank.free_bytes for rank in here) - sum(rank.reserve_bytes for rank in here)
        if needed > _USED * free and needed > 0:
            return False
    return True


def is_short(root: Path = Path("/")) -> bool:
    """Return whether the next step could need more memory than is free: it needs as much as the steps before it."""
    _, growth = _own_bytes(root)
    return growth > free_bytes(root)


def reserve_bytes(root: Path = Path("/")) -> int:
    """Return how many more bytes this process may take: up to its peak so far, and a part of that peak."""
    peak, growth = _own_bytes(root)
    return growth + int(_GROWTH * peak)


def _own_bytes(root: Path) -> tuple[int, int]:
    """Return the most that this process had, and how much less it has now; 0 where the system does not say."""
    found = _figures(root / "proc/self/status")
    peak, now = (1024 * (_number(found.get(name, "")) or 0) for name in ("VmHWM:", "VmRSS:"))
    return peak, max(0, peak - now)


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed because the innermost cgroup with a limit was full."""
    for folder, is_v2 in _cgroups(_text(root / "proc/self/cgroup"), _text(root / "proc/self/mountinfo"), root):
        if _free_in(folder, is_v2) < _V1_UNLIMITED:
            found = _figures(folder / ("memory.events" if is_v2 else "memory.oom_control"))
            return _number(found.get("oom_kill", "")) or 0
    return 0


def host_id(root: Path = Path("/")) -> str:
    """Return the same text for all processes that share the memory of this host."""
    return _text(root / "proc/sys/kernel/random/boot_id").strip() or os.uname().nodename


def free_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still take: of the host, and of each cgroup above it."""
    free = [available_in(_text(root / "proc/meminfo"))]
    for folder, is_v2 in _cgroups(_text(root / "proc/self/cgroup"), _text(root / "proc/self/mountinfo"), root):
        free.append(_free_in(folder, is_v2))
    return max(0, min(free))


def available_in(meminfo: str) -> int:
    """Return the available bytes in the text of /proc/meminfo; a very large number if it does not say."""
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return _V1_UNLIMITED


def _cgroups(cgroup: str, mountinfo: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of the cgroups that count this process's memory, up the hierarchy, and whether each is v2."""
    for mount_root, mount_point, is_v2 in _mounts(mountinfo):
        own = _own_path(cgroup, is_v2)
        if own is None:
            continue
        # In a container the mount may show only the part of the hierarchy below `mount_root`.
        below = own.removeprefix(mount_root).strip("/") if mount_root != "/" else own.strip("/")
        top = root / mount_point.lstrip("/")
        folder = top / below if (top / below).is_dir() else top
        while True:
            yield folder, is_v2
            if folder == top:
                break
            folder = folder.parent


def _mounts(mountinfo: str) -> Iterator[tuple[str, str, bool]]:
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            yield fields[3], fields[4], True
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield fields[3], fields[4], False


def _own_path(cgroup: str, is_v2: bool) -> str | None:
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (is_v2 and number == "0" and not controllers) or (not is_v2 and "memory" in controllers.split(",")):
            return path if not path.startswith("/..") else "/"
    return None


def _free_in(folder: Path, is_v2: bool) -> int:
    names = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit, usage = (_number(_text(folder / name)) for name in names)
    if limit is None or usage is None or limit >= _V1_UNLIMITED:
        return _V1_UNLIMITED
    prefix = "" if is_v2 else "total_"
    wanted = (f"{prefix}active_file", f"{prefix}inactive_file")
    stat = _figures(folder / "memory.stat")
    return limit - usage + sum(_number(stat.get(name, "0")) or 0 for name in wanted)


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _figures(path: Path) -> dict[str, str]:
    """Return the second word of each line of a file by the first."""
    lines = map(str.split, _text(path).splitlines())
    return {words[0]: words[1] for words in lines if len(words) > 1}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
