"""Where the socket of a keeper is: in a private folder of this user, under a name made from the folder of checkpoints.

Whoever may write into that folder could answer in the place of the keeper, so one that is not private is refused. The
path is shorter than what the address of a socket can hold.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import xxhash

from torchtitan_lite.errors import KeeperUnavailable

_NAME = "torchtitan_lite"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ADDRESS_BYTES = 107
"""What fits into sun_path, without the zero at its end."""


def socket_path(folder: Path, runtime: Path | None) -> Path:
    """Return the path of the socket of the keeper of `folder`. Raises `KeeperUnavailable`, and OSError.

    It is in `runtime`, the user's folder for such files, if that is one and short enough, else in the system's folder
    for temporary files. That may be on a disk that hosts share, so each start of each host has names of its own.
    """
    name = xxhash.xxh3_128_hexdigest(os.fsencode(os.path.realpath(folder)) + b"\0" + _host())
    temporary = Path(tempfile.gettempdir()).absolute() / f"{_NAME}-{os.geteuid()}"
    candidates = [temporary / name]
    if runtime is not None and runtime.is_absolute() and _is_own(runtime):
        candidates.insert(0, runtime / _NAME / name)
    for path in candidates:
        if len(os.fsencode(path)) <= _ADDRESS_BYTES:
            return path
    raise KeeperUnavailable(f"the address of a socket holds {_ADDRESS_BYTES} bytes, and {candidates[-1]} is longer")


def make_private(folder: Path) -> None:
    """Make `folder` unless it is there, and refuse one that is not private.

    Raises `KeeperUnavailable`, and OSError.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    refuse_shared(folder)


def refuse_shared(folder: Path) -> None:
    """Raise `KeeperUnavailable` if `folder` is there and is not a folder that only this user can use."""
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no folder"
        raise KeeperUnavailable(f"{folder} is {what}: expected a folder; remove it")
    if found.st_uid != os.geteuid():
        raise KeeperUnavailable(f"{folder} belongs to user {found.st_uid}: expected {os.geteuid()}; remove it")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise KeeperUnavailable(f"other users can use {folder} (mode {mode:o}): expected 700; remove it")


def _host() -> bytes:
    """Return what this start of this host has to itself."""
    try:
        return _BOOT_ID.read_bytes()
    except OSError:
        return os.fsencode(os.uname().nodename)


def _is_own(folder: Path) -> bool:
    try:
        found = folder.stat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
