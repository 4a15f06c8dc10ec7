"""What a process and a keeper send each other: one request, one answer, each a JSON object and at most two descriptors.

The socket keeps the boundaries of messages, so there are no halves of one. Each end looks up the user of the other one
before it reads anything. The keeper imports this module, so it imports little.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import stat
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

VERSION = 1
"""Of the messages. A keeper of another version is not used."""
MAX_MESSAGE_BYTES = 128 << 10
"""Less than the buffer of a socket, by default; the list of `MAX_ENTRIES` names fits."""
MAX_FDS = 2
MAX_ENTRIES = 256
MAX_NAME_LETTERS = 200
MAX_TTL_SECONDS = 1e9
_CREDENTIALS = struct.Struct("3i")
_FD = struct.Struct("i")
_MEMFD_SEALS = 1034
"""F_GET_SEALS, which only files in memory have."""


class BadMessage(ValueError):
    """What came is not a message of this version: the text says what it is."""


def new_socket() -> socket.socket:
    """Return a socket for messages. Raises OSError where the system has none such."""
    # Not SOCK_STREAM, in which a request could arrive in halves.
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process id here and the user id of the other end, as they were when it connected or listened.

    The first is 0 if the process is in a PID namespace that this one cannot see.
    """
    pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


def send(connection: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Send `message` with duplicates of `fds`. Raises OSError."""
    data = json.dumps({"version": VERSION, **message}, separators=(",", ":")).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"a message of {len(data)} bytes is too long")
    if fds:
        socket.send_fds(connection, [data], list(fds))
    else:
        connection.send(data)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and its descriptors, which the caller owns.

    Raises EOFError if the other end has hung up, `BadMessage` for one that is not of this version, and OSError.
    """
    data, fds, flags = _receive_packet(connection)
    try:
        if flags & socket.MSG_CTRUNC:
            raise BadMessage("it has more descriptors than expected, or than this process may open")
        if flags & socket.MSG_TRUNC:
            raise BadMessage(f"it is longer than {MAX_MESSAGE_BYTES} bytes")
        if not data:
            raise EOFError
        return _parse_message(data), fds
    except BaseException:
        close_all(fds)
        raise


def _receive_packet(connection: socket.socket) -> tuple[bytes, list[int], int]:
    # Not socket.recv_fds, which drops its flags (up to Python 3.13): a program started meanwhile would get the
    # descriptors, too.
    room = socket.CMSG_SPACE(MAX_FDS * _FD.size)
    data, controls, flags, _ = connection.recvmsg(MAX_MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    fds = [
        fd
        for level, kind, content in controls
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (fd,) in _FD.iter_unpack(content[: len(content) - len(content) % _FD.size])
    ]
    return data, fds, flags


def _parse_message(data: bytes) -> dict[str, Any]:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise BadMessage(f"it is not JSON: {data[:40]!r}") from None
    if not isinstance(message, dict):
        raise BadMessage("it is not a JSON object")
    if message.get("version") != VERSION:
        raise BadMessage(f"it has format version {message.get('version')!r:.20}, this one is {VERSION}")
    return message


def is_name(name: object) -> bool:
    """Return whether `name` can name what a keeper holds: printable ASCII, of at most `MAX_NAME_LETTERS`."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_LETTERS and name.isascii() and name.isprintable()


def names_in(message: Mapping[str, Any]) -> list[str]:
    """Return the names in `message`. Raises `BadMessage` if it has none such, or more than a keeper holds."""
    names = message.get("names")
    if not isinstance(names, list) or not all(map(is_name, names)):
        raise BadMessage("names: expected a list of names")
    if len(names) > MAX_ENTRIES:
        raise BadMessage(f"it has {len(names)} names, expected at most {MAX_ENTRIES}")
    return names


def is_shared_memory(fd: int) -> bool:
    """Return whether `fd` is a memfd, or as good as one: a file in memory without a name, open for both ways."""
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink:
            return False
        fcntl.fcntl(fd, _MEMFD_SEALS)
        return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    except OSError:
        return False


def is_process(fd: int) -> bool:
    """Return whether `fd` is a pidfd."""
    try:
        target = Path(f"/proc/self/fd/{fd}").readlink()
    except OSError:
        return False
    return target.name.startswith(("anon_inode:[pidfd]", "pidfd:"))


def has_ended(pidfd: int, seconds: float | None) -> bool:
    """Wait until the process of `pidfd` has ended; return whether it has, in `seconds`, or without end for None."""
    poll = select.poll()  # Not select(), which takes no descriptor above 1023.
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


def pid_of(pidfd: int) -> int:
    """Return the process id here; 0 for a process in a PID namespace that this one cannot see, or that has ended."""
    with suppress(OSError, ValueError, StopIteration), Path(f"/proc/self/fdinfo/{pidfd}").open() as lines:
        return max(0, int(next(line for line in lines if line.startswith("Pid:")).split()[1]))
    return 0


def close_all(fds: Sequence[int]) -> None:
    """Close the descriptors in `fds`."""
    for fd in fds:
        os.close(fd)
