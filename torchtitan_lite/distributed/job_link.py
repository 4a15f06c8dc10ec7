"""One connection between helper processes of a job: both ends show that they know its secret.

The secret never travels here. Each end proves that it has it with a number that the other one drew, so nothing that was
heard before can be said again. Each message carries a code over its text and its place in the conversation. The bytes
of a file carry none: who sends one sends its digests in a message.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import socket
import struct
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class HasDescriptor(Protocol):
    """A socket or a link."""

    def fileno(self) -> int: ...


W = TypeVar("W", bound=HasDescriptor)

_NONCE_BYTES = 32
_HEAD = struct.Struct("<Q32s")
"""The length of a message, and its code."""
CHUNK_BYTES = 1 << 20


def ready(waited: Collection[W], seconds: float) -> list[W]:
    """Return those of `waited` that can be read, or have ended; wait for one, at most `seconds`."""
    # Not select.select, which takes no descriptor above 1023: a process may have a link to each rank.
    poll = select.poll()
    by_fd = {each.fileno(): each for each in waited}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poll.poll(1000 * seconds)]


class LinkBroken(OSError):
    """The other end is gone, silent or none of this job: the text says which."""


class JobLink:
    """A connected socket, which this owns. `is_caller`: whether this end has connected. Raises `LinkBroken`.

    The other end may neither send nor take a byte for `silence_seconds`.
    """

    def __init__(
        self, connection: socket.socket, secret: bytes, *, is_caller: bool, silence_seconds: float = 30.0
    ) -> None:
        self._socket, self._key, self._silence_seconds = connection, b"", silence_seconds
        self._sent = self._received = 0
        self._names = (b"caller", b"called") if is_caller else (b"called", b"caller")
        connection.settimeout(silence_seconds)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._meet(secret, is_caller=is_caller)
        except (OSError, ValueError):
            self.close()
            raise

    def _meet(self, secret: bytes, *, is_caller: bool) -> None:
        mine = secrets.token_bytes(_NONCE_BYTES)
        self._send_all(mine)
        theirs = bytes(self._receive_exactly(_NONCE_BYTES))
        nonces = mine + theirs if is_caller else theirs + mine
        self._key = hmac.digest(secret, nonces, "sha256")
        self.send({})
        self.receive()

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any], data: bytes = b"") -> None:
        """Send `message`, and `data` as a message of its own if there is any."""
        for text in (json.dumps(message).encode(), *([data] if data else [])):
            self._send_all(_HEAD.pack(len(text), self._code(self._names[0], self._sent, text)) + text)
            self._sent += 1

    def receive(self) -> dict[str, Any]:
        """Return the next message. Nothing of a later one is read: the descriptor shows whether there is one."""
        message = json.loads(self.receive_data())
        if not isinstance(message, dict):
            raise LinkBroken("it sends no message")
        return message

    def receive_data(self, most: int = 1 << 16) -> bytes:
        """Return the bytes of the next message, which may have `most`."""
        length, code = _HEAD.unpack(self._receive_exactly(_HEAD.size))
        if length > most:
            raise LinkBroken("it is no process of this job")
        text = bytes(self._receive_exactly(length))
        if not hmac.compare_digest(code, self._code(self._names[1], self._received, text)):
            raise LinkBroken("it does not know the secret of this job")
        self._received += 1
        return text

    def send_file(self, fd: int, num_bytes: int, wait_for: Callable[[int], None]) -> None:
        """Send the first `num_bytes` of the file `fd`; `wait_for` is called with the bytes of each part before."""
        with open(fd, "rb", closefd=False) as file:
            for at in range(0, num_bytes, CHUNK_BYTES):
                count = min(CHUNK_BYTES, num_bytes - at)
                wait_for(count)
                self._attempted(partial(self._socket.sendfile, file, at, count))

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`."""
        while view:
            count = self._attempted(partial(self._socket.recv_into, view))
            if not count:
                raise LinkBroken("it hung up")
            view = view[count:]

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()

    def _code(self, name: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(self._key, b"%s %d " % (name, number) + text, "sha256")

    def _send_all(self, data: bytes) -> None:
        self._attempted(partial(self._socket.sendall, data))

    def _receive_exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        self.receive_into(memoryview(data))
        return data

    def _attempted(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except TimeoutError:
            raise LinkBroken(f"it was silent for {self._silence_seconds:g} s") from None
        except OSError as error:
            raise LinkBroken(error.strerror or str(error)) from None
