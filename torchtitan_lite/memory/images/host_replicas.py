"""Replicas: each image of this rank also goes to the memory of another host, which outlives this one.

All ranks replicate the same steps: one at a time, the latest when the one before is complete. That it is, they find out
in the exchange that each image needs anyway: `numbers` go in, `agree` takes what comes out. Until a later step is
complete everywhere, each rank keeps its own image of that step, and its partner the replica: if each sent its latest
image, the hosts could hold replicas of different steps, and of no step all. The hosts form a ring, and each rank sends
to one of the next host.
"""

from __future__ import annotations

import fcntl
import ipaddress
import platform
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.staging.arena import ArenaSlot
from torchtitan_lite.checkpoint.staging.mark import read_mark
from torchtitan_lite.distributed.environment import master_address, replica_interface, runtime_folder
from torchtitan_lite.events import ReplicaMissed, ReplicaReady
from torchtitan_lite.host_memory import host_id
from torchtitan_lite.log import listed, logger, readable_bytes
from torchtitan_lite.memory.images.card import Card, ImageKey
from torchtitan_lite.memory.images.memory_budget import Room, has_no_room_for_replicas
from torchtitan_lite.memory.images.pool import Pool
from torchtitan_lite.memory.images.replica_sender import Outcome, ReplicaJob, ReplicaProcess
from torchtitan_lite.memory.images.tier import Tier

_SECRET_BYTES = 32
_GROWTH = 2
"""By which an image may become larger than at the start of a run: its objects grow."""


class HostReplicas:
    """The replicas of the images that `tier` keeps in `pool`; none if the run wants none."""

    def __init__(self, tier: Tier, pool: Pool, context: RunContext) -> None:
        self._tier, self._pool, self._peers, self._emit = tier, pool, context.peers, context.emit
        self._config, self._clock = context.config, context.clock
        self._process: ReplicaProcess | None = None
        self._turns = Turns()
        self._sending: ArenaSlot | None = None
        self._began, self._ordered, self._finding = 0.0, 0.0, ""
        # The end of a process may be noted while an order is given.
        self._lock = threading.RLock()

    def begin(self, found: Sequence[Room]) -> bool:
        """Agree on where replicas go, given the memory of all ranks; return whether they are made. **Collective**."""
        if self._process is not None:
            return True
        if not self._config.memory_peer_copies:
            return False
        listener = _listener()
        secret = secrets.token_bytes(_SECRET_BYTES) if self._peers.is_coordinator else b""
        address, port = listener.getsockname()[:2]
        mine = ReplicaHost(host_id(), platform.node(), address, port, secret)
        places = self._peers.gather(mine)
        to = partners([place.host for place in places])
        if finding := _copies_finding(places, to, found):
            listener.close()
            if self._peers.is_coordinator:
                logger.warning("No peer copies of in-memory snapshots: %s", finding)
            return False
        if self._peers.is_coordinator:
            logger.info("Peer copies of in-memory snapshots go from host to host: %s", ring_text(places))
        self._pool.num_kept = 2
        job = self._job(places, to, found)
        self._process = ReplicaProcess(job, listener, self._note, self._config.preemption_signals)
        self._start(self._process)
        return True

    def numbers(self) -> tuple[int, int]:
        """Return what this rank reports to the others: that it lacks the replica that is due, and will not have it."""
        self._end_if_stuck()
        return self._turns.numbers(is_sending=self._sending is not None)

    def agree(self, lacks: int, has_failed: int) -> None:
        """Note the maximum over all ranks of what they reported. Main thread; all ranks."""
        with self._lock:
            self._turns.agree(lacks, has_failed)
            if self._turns.complete is not None:
                self._pool.replicated = self._turns.complete.step

    def note_staged(self, step: int, copy: int) -> None:
        """Note that the ranks are about to stage `step` as their `copy`. Main thread; all ranks."""
        if self._process is not None and self._turns.due is None:
            self._start(self._process)
            self._begin(ImageKey(step, self._tier.start, copy))

    def send(self, slot: ArenaSlot, copy: int) -> None:
        """Send the valid image in `slot` if that `copy` is due. Any thread."""
        with self._lock:
            due = self._turns.due
            if due is not None and (due.start, due.copy) == (self._tier.start, copy):
                self._order(slot)

    def resend(self, step: int) -> None:
        """Send the image of `step`, which was loaded: the host that had its replica may be the one that was lost."""
        slot = next((slot for slot in self._pool.slots if slot.is_valid and slot.step == step), None)
        mark = None if slot is None or slot.arena is None else slot.arena.mark
        marked = None if mark is None else read_mark(mark.fd)
        # All ranks have loaded it, or none.
        if self._process is not None and slot is not None and marked is not None:
            card = Card.parse(marked.card)
            self._begin(card.key)
            with self._lock:
                self._order(slot)

    def pause(self) -> None:
        """End the process, and give up what it sends; the next image starts another one. Main thread; all ranks."""
        with self._lock:
            self._turns = Turns()
        if self._process is not None:
            self._process.end()

    def close(self) -> None:
        """End the process that sends and receives; the next start has one of its own. Idempotent."""
        self.pause()
        if self._process is not None:
            self._process.close()
            self._process = None

    def _begin(self, key: ImageKey) -> None:
        with self._lock:
            self._turns.begin(key)
            self._began = self._clock()

    def _start(self, process: ReplicaProcess) -> None:
        try:
            process.start()
        except (OSError, ValueError) as error:  # In a forked child, whose listener is closed.
            self._report(f"the process that sends them does not start: {error}")

    def _order(self, slot: ArenaSlot) -> None:
        if self._sending is not None:  # One that all ranks have given up.
            self._turns.has_failed = True
            return
        assert self._process is not None and slot.arena is not None and slot.arena.mark is not None
        self._pool.add_reader(slot)
        self._sending, self._ordered = slot, self._clock()
        self._process.send(self._turns.complete, (slot.arena.fd, slot.arena.mark.fd))

    def _end_if_stuck(self) -> None:
        """End the process if it takes too long, if it is stopped for instance: the next image has a new one."""
        most = self._config.timeout_seconds
        with self._lock:
            is_stuck = self._sending is not None and self._clock() - self._ordered > most
        if is_stuck and self._process is not None:
            self._report(f"it took longer than checkpoint.timeout_seconds ({most:g} s), so its process was ended")
            self._process.end()

    def _note(self, outcome: Outcome) -> None:
        """Note how the order under way ended, if there is one. Any thread."""
        with self._lock:
            slot, due = self._sending, self._turns.due
            if slot is None:
                return
            self._sending = None
            step, seconds = slot.step, self._clock() - self._began
            if due is not None and due.step == step:
                self._turns.is_sent, self._turns.has_failed = not outcome.finding, bool(outcome.finding)
        self._pool.release(slot)
        if outcome.finding:
            self._report(outcome.finding)
            self._emit(ReplicaMissed(step, reason=outcome.finding))
        else:
            self._finding = ""
            self._emit(ReplicaReady(step, seconds=seconds, bytes=outcome.num_bytes))

    def _report(self, finding: str) -> None:
        """Log `finding` unless it was the last one, too: each image may fail as the one before."""
        if finding != self._finding:
            self._finding = finding
            logger.warning("No peer copy of the in-memory snapshot of rank %d: %s", self._tier.rank, finding)

    def _job(self, places: Sequence[ReplicaHost], to: Sequence[int], found: Sequence[Room]) -> ReplicaJob:
        rank, keeper, runtime = self._tier.rank, self._tier.keeper, runtime_folder()
        senders = tuple(sender for sender, partner in enumerate(to) if partner == rank)
        on_host = sum(place.host == places[rank].host for place in places)
        return ReplicaJob(
            rank=rank,
            start=self._tier.start,
            folder=str(keeper.folder),
            ttl_seconds=keeper.ttl_seconds,
            runtime="" if runtime is None else str(runtime),
            secret=places[0].secret,
            address=places[to[rank]].address,
            port=places[to[rank]].port,
            senders=senders,
            most_bytes=_GROWTH * max((found[sender].arena_bytes for sender in senders), default=0),
            bytes_per_second=self._config.memory_peer_copy_max_mb_per_second * 1e6 / on_host,
        )


def _listener() -> socket.socket:
    """Return a socket that listens where other hosts reach this one; at no address if that is not known."""
    address = own_address(replica_interface(), master_address())
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    if address:
        listener.bind((address, 0))
        listener.listen()
    return listener


def _copies_finding(places: Sequence[ReplicaHost], to: Sequence[int], found: Sequence[Room]) -> str:
    """Return why no replicas can be made; empty if they can. The same on every rank."""
    if not to:
        return "all ranks are on one host"
    lost = next((place.name for place in places if not place.port), None)
    if lost is not None:
        return (
            f"{lost} has no address that other hosts reach. Set TORCHTITAN_LITE_REPLICA_INTERFACE to its network "
            "interface, such as eth0"
        )
    if full := has_no_room_for_replicas(found, to):
        size = readable_bytes(max(room.arena_bytes for room in found))
        name = next(place.name for place in places if place.host == full)
        return (
            f"on {name} the memory has no room for six copies of the state of each rank ({size} each: four of its own, "
            "two of another host). Unset checkpoint.memory_peer_copies, or give the job more memory"
        )
    return ""


_PATIENCE = 3
"""Images that this rank may stage while it has not begun to send the one that is due."""


class Turns:
    """Which image all ranks replicate, as this rank knows: the same on all, because only the exchange changes it."""

    def __init__(self) -> None:
        self.complete: ImageKey | None = None
        """The latest image whose replicas are complete everywhere."""
        self.due: ImageKey | None = None
        """The one that all ranks replicate now; None for none."""
        self.is_sent = self.has_failed = False
        """How far this rank is with it."""
        self._waited = 0

    def begin(self, key: ImageKey) -> None:
        """Make `key` due, after the exchange in which all ranks were done with the one before."""
        self.due, self.is_sent, self.has_failed, self._waited = key, False, False, 0

    def numbers(self, *, is_sending: bool) -> tuple[int, int]:
        """Return whether this rank still lacks the replica that is due, and whether it will not have one."""
        lacks = self.due is not None and not self.is_sent
        if lacks and not is_sending:
            # An image that was never complete here would hold up all ranks for good.
            self._waited += 1
            self.has_failed |= self._waited > _PATIENCE
        return lacks, self.has_failed

    def agree(self, lacks: int, has_failed: int) -> None:
        """Note the maximum over all ranks of their numbers."""
        if self.due is not None and not lacks:
            self.complete, self.due = self.due, None
        elif has_failed:
            # Another rank may still send it; all begin the next one together.
            self.due = None


_SIOCGIFADDR = 0x8915
_IFNAMSIZ = 16
_ANY_PORT = 9


@dataclass(frozen=True)
class ReplicaHost:
    """Where a rank receives replicas."""

    host: str
    """The same for all ranks that share the memory of a host."""
    name: str
    """The host's, for people."""
    address: str
    """By which other hosts reach it; empty if this is not known."""
    port: int
    secret: bytes = b""
    """Of this start of the job; the coordinator's counts."""


def partners(hosts: Sequence[str]) -> list[int]:
    """Return, by rank, the rank that keeps its replicas, given the host of each rank: never one of the same host.

    The hosts are in the order of their first ranks; empty if there is only one.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    if len(by_host) < 2:
        return []
    ring = [*by_host.values()]
    to = {
        rank: following[number % len(following)]
        for own, following in zip(ring, [*ring[1:], ring[0]], strict=True)
        for number, rank in enumerate(own)
    }
    return [to[rank] for rank in range(len(hosts))]


def ring_text(places: Sequence[ReplicaHost]) -> str:
    """Return the ring as people read it: host-1 -> host-2 -> host-1."""
    names = [*{place.host: place.name for place in places}.values()]
    return f"{listed(names, ' -> ', most=8)} -> {names[0]}"


def own_address(interface: str, master: str) -> str:
    """Return the address of the network `interface`, or of the one that leads to `master`; empty if there is none.

    An address of the loopback is none that another host could reach.
    """
    try:
        if interface:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                request = struct.pack("256s", interface.encode()[: _IFNAMSIZ - 1])
                found = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        else:
            family, kind, _, _, address = socket.getaddrinfo(master, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # Sends nothing, but chooses a route.
                found = str(probe.getsockname()[0])
    except OSError:
        return ""
    return "" if ipaddress.ip_address(found.partition("%")[0]).is_loopback else found
