"""A trainer's connection to one thread of its writer process: a request, then its answer.

The process has two such threads, for writes and for digests, so that a digest does not wait behind a write. Both map
the trainer's arenas; a line sends the descriptor of an arena with the first request about it.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Protocol

from torchtitan_lite import faults
from torchtitan_lite.disk.block_writer import InPlace
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.new_file import NewFile
from torchtitan_lite.disk.shared_memory import map_shared

POLL_SECONDS = 0.5
"""Between two checks whether the process is stopped. Its end is seen at once, by the closed socket."""


class Arena(Protocol):
    """Memory that both processes map."""

    fd: int
    num_bytes: int


@dataclass(frozen=True)
class UseArena:
    """Announces arena `number`, of `num_bytes`: its descriptor is in the next message. Others but `live` are gone."""

    number: int
    num_bytes: int
    live: tuple[int, ...]


@dataclass(frozen=True)
class Write:
    """Requests to write the first `num_bytes` of an arena to the file `new`, durably."""

    arena: int
    new: NewFile
    num_bytes: int
    step: int
    record: FileRecord | None
    """What the answer is, if it is known; else the process takes the digests."""


@dataclass(frozen=True)
class DigestRequest:
    """Requests the record of a file that would be the first `num_bytes` of an arena."""

    arena: int
    num_bytes: int
    step: int


class LineBroken(Exception):
    """The process ended, is stopped, or was silent for too long. The message says which."""


class Line:
    """The trainer's end. One request at a time, from any thread."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        ours, self.theirs = socket.socketpair()
        # A stopped process reads nothing: sending to it needs a time-out, too.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", math.ceil(timeout_seconds), 0))
        self._connection = Connection(ours.detach())
        self._arenas: list[Arena | None] = []

    def ask(
        self, request: Callable[[int], Write | DigestRequest], arena: Arena, pid: int, is_stopped: Callable[[int], bool]
    ) -> FileRecord | Exception:
        """Return the answer of process `pid` to a request, made from the number of `arena`. Raises `LineBroken`."""
        with self._lock:
            try:
                self._connection.send(request(self._share(arena)))
                return self._receive(pid, is_stopped)
            except (EOFError, OSError) as error:
                raise LineBroken(f"ended ({type(error).__name__})") from error

    def hang_up(self) -> None:
        """Close the connection, also for forked children that have a copy of this end. Idempotent."""
        if self._connection.closed:
            return
        end = socket.socket(fileno=self._connection.fileno())
        with suppress(OSError):  # The other end is closed already.
            # Not only closed: a forked child may have a copy of this end, which would keep the connection open.
            end.shutdown(socket.SHUT_RDWR)
        end.detach()
        with self._lock:  # A request that was under way has failed by now.
            self._connection.close()

    def forget(self) -> None:
        """Close the descriptor in a forked child; the parent's connection stays."""
        self._connection.close()
        self._arenas = []

    def _share(self, arena: Arena) -> int:
        """Return the number of `arena`, after sending its descriptor if the process does not have it."""
        # Arenas that are gone keep their place, because the process knows the others by their numbers.
        self._arenas = [each if each is not None and each.fd >= 0 else None for each in self._arenas]
        for number, known in enumerate(self._arenas):
            if known is arena:
                return number
        self._arenas.append(arena)
        number = len(self._arenas) - 1
        live = tuple(at for at, each in enumerate(self._arenas) if each is not None)
        self._connection.send(UseArena(number, arena.num_bytes, live))
        self._send_descriptor(arena.fd)
        return number

    def _send_descriptor(self, fd: int) -> None:
        """Send `fd` as `reduction.send_handle` does, but without a second descriptor that a fork could inherit."""
        end = socket.socket(fileno=self._connection.fileno())
        try:
            reduction.sendfds(end, [fd])
        finally:
            end.detach()

    def _receive(self, pid: int, is_stopped: Callable[[int], bool]) -> FileRecord | Exception:
        deadline = time.monotonic() + self._timeout_seconds
        while not self._connection.poll(POLL_SECONDS):
            if is_stopped(pid):
                raise LineBroken("was stopped")
            if time.monotonic() > deadline:
                raise LineBroken(f"was silent for {self._timeout_seconds:.0f} s")
        answer: FileRecord | Exception = self._connection.recv()
        return answer


def answer_all(socket_fd: int) -> None:
    """Answer the requests that come over a socket, in the process, until the trainer closes it or dies."""
    arenas: dict[int, memoryview] = {}
    with Connection(socket_fd) as connection:
        while True:
            try:
                message = connection.recv()
                if isinstance(message, UseArena):
                    for number in arenas.keys() - {*message.live}:
                        del arenas[number]
                    arenas[message.number] = _map(reduction.recv_handle(connection), message.num_bytes)
                else:
                    connection.send(_answer(message, arenas[message.arena]))
            except (EOFError, ConnectionError):
                return


def _answer(request: Write | DigestRequest, memory: memoryview) -> FileRecord | Exception:
    try:
        if isinstance(request, DigestRequest):
            return _digested(memory, request)
        faults.set_step(request.step)
        return request.new.write(InPlace(memory, request.num_bytes, request.record))
    except Exception as error:
        return error


def _digested(memory: memoryview, request: DigestRequest) -> FileRecord:
    faults.point("digest", step=request.step)
    return FileRecord.of(memory[: request.num_bytes])


def _map(fd: int, num_bytes: int) -> memoryview:
    try:
        return map_shared(fd, num_bytes)
    finally:
        os.close(fd)
