"""A helper of a rank that exchanges replicas: images of this rank go to another host, those of others come here.

What has arrived it compares with its digests and gives to the keeper of its host, so it outlives both. It is not the
writer, because a replica that hangs ends the process, and would fail a write. Nothing that goes wrong here is more to a
trainer than a replica that is missed.
`ReplicaProcess` is the end of the trainer, `serve` the end of the process, `ReplicaMemory` what it keeps: for each rank
of other hosts one image that is valid, and one that arrives.
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
from torchtitan_lite.checkpoint.staging.mark import CARD_MOST_BYTES, Mark, Marked, read_mark
from torchtitan_lite.disk.digest import digest_blocks
from torchtitan_lite.disk.helper import Helper, Line, Rate
from torchtitan_lite.disk.shared_memory import map_shared
from torchtitan_lite.disk.threads import daemon, give_way
from torchtitan_lite.distributed.job_link import JobLink
from torchtitan_lite.errors import KeeperUnavailable, UnknownFormat
from torchtitan_lite.memory.images.card import Card, ImageKey
from torchtitan_lite.memory.images.snapshot_match import is_replica, replica_name
from torchtitan_lite.memory.keeper.client import HeldMemory, Keeper

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


class Outcome(NamedTuple):
    """How an order ended: to send one image, while another one may stay."""

    num_bytes: int = 0
    """That were sent: none where the other host has the image already."""
    finding: str = ""
    """Why it failed."""


class ReplicaProcess(Helper):
    """The trainer's end, of one order at a time. `note` gets its outcome, in a thread, also if the process ends."""

    def __init__(
        self, job: ReplicaJob, listener: socket.socket, note: Callable[[Outcome], None], signals: Sequence[str] = ()
    ) -> None:
        super().__init__("Replica", __name__, signals)
        self._job, self._listening, self._note = job, listener, note

    def start(self) -> None:
        """Start the process unless it lives. Main thread only. Raises OSError."""
        if self.pid is None:
            self.end()
            self._start(self._job, [self._listening.fileno()])
            self._listen()

    def send(self, keeps: ImageKey | None, fds: tuple[int, int]) -> None:
        """Have the process send the image in `fds` (memory, mark); both may be closed on return. Any thread.

        The replica `keeps` stays until it is complete; None for none.
        """
        try:
            self._send(keeps, fds)
        except OSError as error:
            self._note(Outcome(finding=str(error)))

    def close(self) -> None:
        """End the process for good. Idempotent."""
        self.end()
        self._listening.close()

    def forget(self) -> None:
        super().forget()
        self._listening.close()

    def _heard(self, message: Outcome) -> None:
        self._note(message)

    def _ended(self, *, has_died: bool) -> None:
        self._note(Outcome(finding="the process that sends peer copies ended"))


def serve(job: ReplicaJob, lines: Sequence[Line], fds: Sequence[int]) -> None:
    """Send and receive, in the process, until the trainer hangs up or dies."""
    # Before the first thread, because threads inherit the priority.
    give_way()
    log.setup(0)
    (line,), listener = lines, socket.socket(fileno=fds[0])
    keeper = Keeper(Path(job.folder), job.ttl_seconds, runtime=Path(job.runtime) if job.runtime else None)
    daemon("receiver", _receive_all, job, listener, keeper)
    sender = _Sender(job)
    with suppress(EOFError):
        while True:
            keeps, image = line.receive_with_fds()
            try:
                line.send(sender.outcome(keeps, *image))
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

    def outcome(self, keeps: ImageKey | None, arena_fd: int, mark_fd: int) -> Outcome:
        """Send the image in the descriptors; return how that ended."""
        try:
            return Outcome(self._sent(_marked(mark_fd), keeps, arena_fd))
        except (OSError, ValueError) as error:
            if self._link is not None:
                self._link.close()
                self._link = None
            return Outcome(finding=f"{self._job.address}: {error}"[:_MOST_LETTERS])

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
            raise ValueError(f"the other host does not keep the peer copy: {finding:.200}")
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
    raise ValueError("the snapshot is no longer valid")


def _receive_all(job: ReplicaJob, listener: socket.socket, keeper: Keeper) -> None:
    memory = ReplicaMemory(keeper, job.start, job.senders, job.most_bytes)
    listener.setblocking(True)
    while True:
        connection, _ = listener.accept()
        try:
            daemon("copies", _receive_copies, connection, job.secret, memory)
        except OSError:
            connection.close()  # Its other end tries again.


def _receive_copies(connection: socket.socket, secret: bytes, memory: ReplicaMemory) -> None:
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
            if place is None:
                link.send({"has_it": True})
                continue
            try:
                link.send({"has_it": False})
                link.receive_into(place.view)
                link.send({"finding": memory.finding_after(place, card)})
            finally:
                memory.release(place)


@dataclass(eq=False)
class ReplicaPlace:
    """Memory for one replica."""

    name: str
    arena_fd: int
    mark: Mark
    size: int
    key: ImageKey | None = None
    """Of the valid image in it; None for none."""
    card: Card | None = None
    """Of the image that arrives; None for none."""
    num_bytes: int = 0

    @property
    def view(self) -> memoryview:
        """The memory of the image that arrives."""
        return map_shared(self.arena_fd, self.num_bytes)


class ReplicaMemory:
    """The replicas of the ranks `senders` at `keeper`, also those of the start before. Any thread."""

    def __init__(self, keeper: Keeper, start: str, senders: Sequence[int], most_bytes: int) -> None:
        self._keeper, self._start, self._most_bytes = keeper, start, most_bytes
        self._lock = threading.Lock()
        self._places: dict[int, list[ReplicaPlace]] = {rank: [] for rank in senders}
        self._has_adopted = False

    def place(self, card: Card, num_bytes: int, keeps: ImageKey | None) -> ReplicaPlace | None:
        """Return the memory for the image of `card`, which is empty now; None if that very image is here.

        The caller releases it. All but the image `keeps` may be overwritten. Raises ValueError for one that is not
        expected here, `KeeperUnavailable`, and OSError.
        """
        key = card.key
        if card.rank not in self._places:
            raise ValueError(f"rank {card.rank} has its peer copies on another host")
        if not card.record.size <= num_bytes <= self._most_bytes:
            raise ValueError(f"expected {card.record.size} to {self._most_bytes} bytes, found {num_bytes}")
        with self._lock:
            self._join()
            places = self._places[card.rank]
            if any(place.key == key for place in places):
                return None
            # Not what arrives: a connection that broke may still write into it.
            spare = [place for place in places if place.card is None and (place.key is None or place.key != keeps)]
            fitting = next((place for place in spare if place.size >= num_bytes), None)
            for place in spare:
                place.mark.clear()
                place.key = None
                if place is not fitting:
                    self._free(card.rank, place)
            if fitting is None:
                fitting = self._made(card.rank, num_bytes)
            fitting.card, fitting.num_bytes = card, num_bytes
            return fitting

    def finding_after(self, place: ReplicaPlace, card: bytes) -> str:
        """Make the replica in `place` valid, which has arrived, if the keeper holds it; return what is wrong."""
        assert place.card is not None, "an image was to arrive"
        record = place.card.record
        if digest_blocks(place.view[: record.size]) != record.blocks:
            return "its bytes do not have their digests"
        place.mark.set(place.card.key.step, place.num_bytes, card)
        try:
            self._keeper.keep(place.name, (place.arena_fd, place.mark.fd))
        except KeeperUnavailable as error:
            place.mark.clear()
            return str(error)
        place.key = place.card.key
        return ""

    def release(self, place: ReplicaPlace) -> None:
        """Note that nothing is written into `place` any more."""
        with self._lock:
            place.card = None

    def _join(self) -> None:
        """Join the keeper, which the trainer may have started again."""
        if self._has_adopted and not self._keeper.has_ended():
            return
        self._keeper.join(self._start)
        if not self._has_adopted:
            for held in self._keeper.held():
                self._adopt(held)
            self._has_adopted = True
            return
        for place in [place for places in self._places.values() for place in places if place.key]:
            self._keeper.keep(place.name, (place.arena_fd, place.mark.fd))

    def _adopt(self, held: HeldMemory) -> None:
        """Take over what the start before kept of the same ranks; it has the only replicas until new ones are here."""
        try:
            marked = read_mark(held.mark_fd) if is_replica(held.name) else None
            card = None if marked is None else Card.parse(marked.card)
            if card is not None and card.rank in self._places:
                size = os.fstat(held.arena_fd).st_size
                place = ReplicaPlace(held.name, held.arena_fd, Mark(held.mark_fd), size, card.key)
                self._places[card.rank].append(place)
                return
        except (UnknownFormat, ValueError, OSError):
            pass  # What cannot be read is none, and its memory is freed with the keeper.
        held.close()

    def _made(self, rank: int, num_bytes: int) -> ReplicaPlace:
        arena_fd = os.memfd_create("torchtitan_lite-replica", os.MFD_CLOEXEC)
        os.ftruncate(arena_fd, max(num_bytes, 1))
        place = ReplicaPlace(replica_name(self._start, rank), arena_fd, Mark(), num_bytes)
        self._places[rank].append(place)
        return place

    def _free(self, rank: int, place: ReplicaPlace) -> None:
        self._places[rank].remove(place)
        with suppress(KeeperUnavailable):
            self._keeper.drop([place.name])
        os.close(place.arena_fd)
        place.mark.close()
