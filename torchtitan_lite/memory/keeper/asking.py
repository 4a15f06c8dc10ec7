"""One connection to a keeper: requests and their answers, all of them before one deadline.

Who answers is unknown until the system says which user it is, and what it answers may be anything.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchtitan_lite.disk.helper import is_stopped
from torchtitan_lite.errors import KeeperUnavailable
from torchtitan_lite.memory.keeper import messages

STOPPED_SECONDS = 1.0
"""How long a process that leaves waits for a keeper that is stopped: it may continue at once."""
_LOOK_SECONDS = 0.1


class NoKeeper(Exception):
    """No process listens at the socket."""


class HungUp(Exception):
    """The keeper closed the connection without an answer: it is ending."""


class Ask:
    """An open connection, which is over at a deadline; while it `hurries`, also if the keeper proves to be stopped."""

    def __init__(self, connection: socket.socket, deadline: float, hurries: Callable[[], bool]) -> None:
        self._connection, self._deadline = connection, deadline
        self._hurries = hurries

    def __call__(
        self,
        request: Mapping[str, Any],
        fds: Sequence[int] = (),
        *,
        may_fail: bool = False,
        wants_fds: bool = False,
    ) -> tuple[dict[str, Any], list[int]]:
        """Return the answer to `request` and its descriptors; without `wants_fds` none.

        Raises `KeeperUnavailable` if the answer is an error, unless it `may_fail`.
        """
        try:
            self._connection.settimeout(_left(self._deadline))
            messages.send(self._connection, request, fds)
            self._wait()
            self._connection.settimeout(_left(self._deadline))
            answer, received = messages.receive(self._connection)
        except (EOFError, ConnectionError):
            raise HungUp from None
        if "error" in answer or not wants_fds:
            messages.close_all(received)
            received = []
        if "error" in answer and not may_fail:
            raise KeeperUnavailable(f"the keeper refuses: {' '.join(str(answer['error'])[:200].split())}")
        return answer, received

    def _wait(self) -> None:
        """Wait for the answer. Raises TimeoutError."""
        began, poll = time.monotonic(), select.poll()
        poll.register(self._connection, select.POLLIN)
        while not poll.poll(1000 * min(_left(self._deadline), _LOOK_SECONDS)):
            is_late = time.monotonic() - began >= STOPPED_SECONDS
            if is_late and self._hurries() and is_stopped(messages.peer_of(self._connection)[0]):
                raise TimeoutError

    def open_peer(self) -> int:
        """Return a pidfd of the keeper, which the caller owns; -1 if it is in a PID namespace that is not seen here.

        Raises as a call does, and OSError.
        """
        pid, _ = messages.peer_of(self._connection)
        if not pid:
            return -1
        pidfd = os.pidfd_open(pid)
        try:
            self({"what": "hello"})  # It lives, so no other process has its pid yet.
        except BaseException:
            os.close(pidfd)
            raise
        return pidfd


@contextmanager
def connected(path: Path, seconds: float, hurries: Callable[[], bool] = bool) -> Iterator[Ask]:
    """Connect to the keeper at `path`, for `seconds`; while it `hurries`, for `STOPPED_SECONDS` if that is stopped.

    Raises `NoKeeper`, at once; `KeeperUnavailable` if another user answers, or none in time; and OSError.
    """
    if not os.path.lexists(path):
        raise NoKeeper  # Also on a system without such sockets.
    with messages.new_socket() as connection:
        deadline = time.monotonic() + seconds
        try:
            _connect(connection, path, deadline)
            _, user = messages.peer_of(connection)
            if user != os.geteuid():
                raise KeeperUnavailable(f"user {user} answers in place of the keeper: expected {os.geteuid()}")
            yield Ask(connection, deadline, hurries)
        except TimeoutError:
            pid, _ = messages.peer_of(connection)
            keeper = f"the keeper (process {pid})" if pid else "the keeper"
            if time.monotonic() < deadline:
                raise KeeperUnavailable(f"{keeper} is stopped") from None
            raise KeeperUnavailable(
                f"{keeper} did not answer within {seconds:g} s: it is stopped, or this machine is too busy"
            ) from None


def _connect(connection: socket.socket, path: Path, deadline: float) -> None:
    while True:
        connection.settimeout(_left(deadline))
        try:
            connection.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError):
            raise NoKeeper from None
        except BlockingIOError:  # Too many others wait for it.
            time.sleep(0.01)
        else:
            return


def _left(deadline: float) -> float:
    """Return the seconds until `deadline`. Raises TimeoutError when it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
