"""The memory of the host, as this process may use it.

A process is killed when a cgroup above it is full, which MemAvailable does not show, so the least of all limits counts.
Pages of files count as free: the kernel drops them first. Pure functions of texts, and readers of /proc and /sys.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_V1_UNLIMITED = 1 << 60
"""cgroup v1 says a number of about 2^63 for no limit."""


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed because the innermost cgroup with a limit was full."""
    for folder, is_v2 in _cgroups(root):
        if _free_in(folder, is_v2) < _V1_UNLIMITED:
            found = figures(folder / ("memory.events" if is_v2 else "memory.oom_control"))
            return parse_number(found.get("oom_kill", "")) or 0
    return 0


def host_id(root: Path = Path("/")) -> str:
    """Return the same text for all processes that share the memory of this host."""
    return _file_text(root / "proc/sys/kernel/random/boot_id").strip() or os.uname().nodename


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still take: of the host, and of each cgroup above it."""
    free = [available_in(_file_text(root / "proc/meminfo"))]
    free += [_free_in(folder, is_v2) for folder, is_v2 in _cgroups(root)]
    return max(0, min(free))


def available_in(meminfo: str) -> int:
    """Return the available bytes in the text of /proc/meminfo; a very large number if it does not say."""
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return _V1_UNLIMITED


def _cgroups(root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of the cgroups that count this process's memory, up the hierarchy, and whether each is v2."""
    cgroup = _file_text(root / "proc/self/cgroup")
    for mount_root, mount_point, is_v2 in _mounts(_file_text(root / "proc/self/mountinfo")):
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
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (is_v2 and hierarchy == "0" and not controllers) or (not is_v2 and "memory" in controllers.split(",")):
            return path if not path.startswith("/..") else "/"
    return None


def _free_in(folder: Path, is_v2: bool) -> int:
    names = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit, usage = (parse_number(_file_text(folder / name)) for name in names)
    if limit is None or usage is None or limit >= _V1_UNLIMITED:
        return _V1_UNLIMITED
    prefix = "" if is_v2 else "total_"
    wanted = (f"{prefix}active_file", f"{prefix}inactive_file")
    stat = figures(folder / "memory.stat")
    return limit - usage + sum(parse_number(stat.get(name, "0")) or 0 for name in wanted)


def parse_number(text: str) -> int | None:
    """Return the number that `text` is; None if it is none."""
    return int(text) if text.strip().isdecimal() else None


def figures(path: Path) -> dict[str, str]:
    """Return the second word of each line of a file by the first."""
    lines = map(str.split, _file_text(path).splitlines())
    return {words[0]: words[1] for words in lines if len(words) > 1}


def _file_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
