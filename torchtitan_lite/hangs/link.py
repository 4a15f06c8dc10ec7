"""A connection between the watchers of two ranks: JSON objects, one a line, each with a code of authentication.

The job's secret makes the codes and never travels here, so another user of the network can neither end a job nor have
a rank named. What has no right code ends the connection.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import select
import socket
from collections.abc import Collection, Mapping
from typing import Any, Protocol, TypeVar

SEND_SECONDS = 1.0
_MOST_BYTES = 1 << 20


class HasDescriptor(Protocol):
    """A socket or a link."""

    def fileno(self) -> int: ...


W = TypeVar("W", bound=HasDescriptor)


def ready(waited: Collection[W], seconds: float) -> list[W]:
    """Return those of `waited` that can be read, or have ended; wait for one, at most `seconds`."""
    # Not select.select, which takes no descriptor above 1023: the judge has one for each rank.
    poll = select.poll()
    by_fd = {each.fileno(): each for each in waited}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poll.poll(1000 * seconds)]


class Link:
    """One end. All failures are OSErrors, also that the other end has hung up."""

    def __init__(self, connection: socket.socket, secret: str) -> None:
        connection.settimeout(SEND_SECONDS)
        self._connection = connection
        self._secret = secret.encode()
        self._unread = b""

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._connection.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send `message`."""
        body = json.dumps(message).encode()
        self._connection.sendall(self._code(body) + b" " + body + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that became complete; call it when the descriptor is ready."""
        data = self._connection.recv(1 << 16)
        *lines, self._unread = (self._unread + data).split(b"\n")
        if not data or len(self._unread) > _MOST_BYTES:
            raise ConnectionError("the other end has hung up, or sends no lines")
        return [self._checked(line) for line in lines]

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _checked(self, line: bytes) -> dict[str, Any]:
        code, _, body = line.partition(b" ")
        if not hmac.compare_digest(code, self._code(body)):
            raise ConnectionError("a message does not have the code of this job")
        message: dict[str, Any] = json.loads(body)
        return message

    def _code(self, body: bytes) -> bytes:
        return hmac.new(self._secret, body, hashlib.sha256).hexdigest().encode()
