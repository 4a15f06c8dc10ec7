"""A helper of a rank that exchanges replicas: images of this rank go to another host, those of others come here.

What has arrived it compares with its digests and gives to the keeper of its host, so it outlives both. It is not the
writer, because a replica that hangs ends the process, and would fail a write. Nothing that goes wrong here is more to a
trainer than a replica that is missed.
`ReplicaProcess` is the end of the trainer, `serve` the end of the process.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_lite import log
from torchtitan_lite.checkpoint.images.card import Card, ImageKey
from torchtitan_lite.checkpoint.replicas.memory import ReplicaMemory
from torchtitan_lite.checkpoint.staging.mark import CARD_MOST_BYTES, Marked, read_mark
from torchtitan_lite.disk.background import give_way
from torchtitan_lite.disk.helper import Helper, Line
from torchtitan_lite.disk.rate import Rate
from torchtitan_lite.distributed.job_link import JobLink
from torchtitan_lite.errors import KeeperUnavailable
from torchtitan_lite.keeper.client import Keeper

_MOST_LETTERS = 500
_TRIES = 3


@dataclass(frozen=True)
class ReplicaJob:
    """What the process works for."""

    rank: int
    start: str
    folder: str
    """Of checkpoints: that of the keeper."""
    ttl_seconds: float
    runtime: str
    secret: bytes
    address: str
    """Of the rank that keeps this one's replicas."""
    port: int
    senders: tuple[int, ...]
    """The ranks whose replicas come here."""
    most_bytes: int
    """Of one of those."""
    bytes_per_second: float
    """0 for as many as the network takes."""


class Order(NamedTuple):
    """An image to send; its descriptors come with it."""

    number: int
    keeps: ImageKey | None
    """The replica that stays until this one is complete; None for none."""


class Outcome(NamedTuple):
    """How an order ended."""

    number: int
    num_bytes: int = 0
    """That were sent: none where the other host has the image already."""
    finding: str = ""
    """Why it failed."""


class ReplicaProcess(Helper):
    """The trainer's end. `note` gets the outcome of each order, in a thread; all are lost if the process ends."""

    def __init__(
        self, job: ReplicaJob, listener: socket.socket, note: Callable[[Outcome], None], signals: Sequence[str] = ()
    ) -> None:
        super().__init__("Replica", __name__, signals)
        self._job, self._listening, self._note = job, listener, note
        self._under_way: set[int] = set()
        self._lock = threading.Lock()

    def start(self) -> bool:
        """Start the process unless it lives; return whether it was started. Main thread only. Raises OSError."""
        if self.pid is not None:
            return False
        self.end()
        self._start(self._job, [self._listening.fileno()])
        self._listen()
        return True

    def send(self, order: Order, fds: tuple[int, int]) -> None:
        """Have the process send the image in `fds` (memory, mark); both may be closed on return. Any thread."""
        with self._lock:
            self._under_way.add(order.number)
        try:
            self._send(order, fds)
        except OSError as error:
            self._heard(Outcome(order.number, finding=str(error)))

    def close(self) -> None:
        """End the process for good. Idempotent."""
        self.end()
        self._listening.close()

    def forget(self) -> None:
        super().forget()
        self._listening.close()

    def _heard(self, message: Outcome) -> None:
        with self._lock:
            is_first = message.number in self._under_way
            self._under_way.discard(message.number)
        if is_first:
            self._note(message)

    def _ended(self, *, has_died: bool) -> None:
        for number in [*self._under_way]:
            self._heard(Outcome(number, finding="the process that sends replicas ended"))


def serve(job: ReplicaJob, lines: Sequence[Line], fds: Sequence[int]) -> None:
    """Send and receive, in the process, until the trainer hangs up or dies."""
    # Before the first thread, because threads inherit the priority.
    give_way()
    log.setup(0)
    (line,), listener = lines, socket.socket(fileno=fds[0])
    keeper = Keeper(Path(job.folder), job.ttl_seconds, runtime=Path(job.runtime) if job.runtime else None)
    receiver = threading.Thread(target=_receive_all, args=(job, listener, keeper), daemon=True)
    receiver.start()
    sender = _Sender(job)
    with suppress(EOFError):
        while True:
            order, image = line.receive_with_fds()
            try:
                line.send(sender.outcome(order, *image))
            finally:
                for fd in image:
                    os.close(fd)
    os._exit(0)


class _Sender:
    """Sends the images of this rank, over one connection that it opens again when it broke."""

    def __init__(self, job: ReplicaJob) -> None:
        self._job = job
        self._rate = Rate(job.bytes_per_second)
        self._link: JobLink | None = None

    def outcome(self, order: Order, arena_fd: int, mark_fd: int) -> Outcome:
        """Send the image in the descriptors; return how that ended."""
        try:
            return Outcome(order.number, self._sent(_marked(mark_fd), order.keeps, arena_fd))
        except (OSError, ValueError) as error:
            if self._link is not None:
                self._link.close()
                self._link = None
            return Outcome(order.number, finding=f"{self._job.address}: {error}"[:_MOST_LETTERS])

    def _sent(self, marked: Marked, keeps: ImageKey | None, arena_fd: int) -> int:
        if self._link is None:
            connection = socket.create_connection((self._job.address, self._job.port), timeout=10.0)
            self._link = JobLink(connection, self._job.secret, is_caller=True)
        self._link.send({"num_bytes": marked.num_bytes, "keeps": keeps}, marked.card)
        if self._answer(self._link).get("has_it"):
            return 0
        self._link.send_file(arena_fd, marked.num_bytes, self._rate.wait_for)
        self._answer(self._link)
        return marked.num_bytes

    def _answer(self, link: JobLink) -> dict[str, Any]:
        answer = link.receive()
        if finding := answer.get("finding"):
            raise ValueError(f"it does not keep the replica: {finding:.200}")
        return answer


def _marked(mark_fd: int) -> Marked:
    """Return what the mark says. Raise ValueError if it says nothing."""
    # The trainer may write the card again meanwhile.
    for left in reversed(range(_TRIES)):
        try:
            if (marked := read_mark(mark_fd)) is not None:
                return marked
        except ValueError:
            if not left:
                raise
    raise ValueError("the image is not valid any more")


def _receive_all(job: ReplicaJob, listener: socket.socket, keeper: Keeper) -> None:
    memory = ReplicaMemory(keeper, job.start, job.senders, job.most_bytes)
    listener.setblocking(True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_receive, args=(connection, job.secret, memory), daemon=True).start()


def _receive(connection: socket.socket, secret: bytes, memory: ReplicaMemory) -> None:
    # Whoever knows no secret ends here, too.
    with closing(connection), suppress(OSError, ValueError):
        link = JobLink(connection, secret, is_caller=False)
        while True:
            header = link.receive()
            card = link.receive_data(CARD_MOST_BYTES)
            keeps = header.get("keeps")
            try:
                place = memory.place(Card.parse(card), header["num_bytes"], ImageKey(*keeps) if keeps else None)
            except (KeeperUnavailable, ValueError, KeyError, TypeError, OSError) as error:
                link.send({"finding": str(error)})
                continue
            link.send({"has_it": place is None})
            if place is None:
                continue
            try:
                link.receive_into(place.view)
                link.send({"finding": memory.finding_after(place, card)})
            finally:
                memory.release(place)
