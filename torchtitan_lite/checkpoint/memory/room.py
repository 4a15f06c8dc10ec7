"""How much memory this process may still take, and for how many arenas that is enough.

A process is killed when a cgroup above it is full, which MemAvailable does not show, so the least of all limits counts.
Pages of files count as free: the kernel drops them first. Pure functions of texts, and readers of /proc and /sys.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_ARENAS = 3
_USED = 0.8
"""The part of the free memory that arenas may take: what else grows takes the rest."""
_V1_UNLIMITED = 1 << 60
"""cgroup v1 says a number of about 2^63 for no limit."""


def num_arenas(ranks: Sequence[tuple[str, int, int, int]]) -> int:
    """Return how many arenas of its size each rank can have, at most `MAX_ARENAS`; less than 2 is not enough.

    For each rank: its host, the bytes of one arena (negative if unknown), the bytes of arenas that it has, and the
    bytes that are free on its host.
    """
    if any(num_bytes < 0 for _, num_bytes, _, _ in ranks):
        return 0
    return next((number for number in range(MAX_ARENAS, 0, -1) if _fits(ranks, number)), 0)


def _fits(ranks: Sequence[tuple[str, int, int, int]], number: int) -> bool:
    for host in {host for host, *_ in ranks}:
        here = [rank for rank in ranks if rank[0] == host]
        needed = sum(max(0, number * num_bytes - have) for _, num_bytes, have, _ in here)
        if needed > _USED * min(free for *_, free in here):
            return False
    return True


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
    stat = dict(line.split()[:2] for line in _text(folder / "memory.stat").splitlines() if len(line.split()) >= 2)
    return limit - usage + sum(_number(stat.get(name, "0")) or 0 for name in wanted)


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
