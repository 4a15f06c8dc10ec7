"""On what a path is: the mount as this process sees it, in words. Other processes, and other hosts, may see another."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path, PurePath

_MOUNTINFO = Path("/proc/self/mountinfo")


def mount_of(path: Path) -> str:
    """Return the mount that `path` is on, as in "nfs4 server:/export at /data"; empty where the system does not say."""
    try:
        return mount_in(_MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape"), path.resolve())
    except (OSError, RuntimeError):  # The second: a circle of links.
        return ""


def mount_in(mountinfo: str, path: PurePath) -> str:
    """Return the same from the text of /proc/self/mountinfo, for a `path` that is absolute and without links.

    The folder of the file system that is mounted follows its source in brackets, as findmnt has it.
    """
    found, length = "", -1
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")
        if len(fields) < 5 or len(kind) < 2:
            continue
        root, point = PurePath(_unescaped(fields[3])), PurePath(_unescaped(fields[4]))
        # Of equal places the last one covers the others.
        if path.is_relative_to(point) and len(point.parts) >= length:
            folder = "" if root == PurePath("/") else f"[{root}]"
            found, length = f"{kind[0]} {_unescaped(kind[1])}{folder} at {point}", len(point.parts)
    return found


@functools.cache
def is_fuse(device: int) -> bool:
    """Return whether the file system with the number `device` (st_dev) is of FUSE: a daemon answers its requests."""
    try:
        return is_fuse_in(_MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape"), device)
    except OSError:
        return False


def is_fuse_in(mountinfo: str, device: int) -> bool:
    """Return the same from the text of /proc/self/mountinfo."""
    number = f"{os.major(device)}:{os.minor(device)}"
    halves = (line.partition(" - ")[::2] for line in mountinfo.splitlines())
    return any(left.split(" ")[2:3] == [number] and kind.startswith("fuse") for left, kind in halves)


def _unescaped(field: str) -> str:
    """Return a field of mountinfo with its characters in place of their numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
