"""Which ranks read the same bytes, so that these are read once.

Ranks of DDP have equal plans, as have those with the same shard under HSDP. On one host they read from a disk through
the page cache: the first one that asks for a page reads it, and the others, which ask in the same order, wait for that
page and copy it. Nothing else joins them: a rank that fails, or is late, delays no other one. What one rank alone reads
stays out of the page cache: to make room for it there takes longer than to read it. From an object store each rank
fetches a part, and gives it to the others (host_exchange.py).

Of several hosts each rank reads a part of the bytes, and they pass them on to each other (`RelayedReader`). The
requests of a file are numbered, and their owners take turns. All ranks go through them in the same order: the owner of
a request reads it, ahead of its turn, and it goes around (`Relay`). What comes from another rank
is verified like what comes from a disk; what is wrong is read again. Whether that is faster than if each rank read all
of it follows from the first bytes: a rank that finds that it is not says so with its next request, as does one that
cannot read, and after that request each rank reads for itself.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import xxhash

from torchtitan_lite.checkpoint.reading.regions import RankReads
from torchtitan_lite.disk.block_reader import CheckedFile
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.read_requests import (
    REQUEST_BYTES,
    Piece,
    PieceTable,
    ReadsBlocks,
    Segment,
    request_memory,
    scatter,
    segments,
)
from torchtitan_lite.distributed.host_exchange import MOST_RANKS, Exchanges, HostExchange, made, opened_rings
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import PeerLost
from torchtitan_lite.host_memory import host_id

SHARED_BYTES = 64 << 20
"""Below this, to read twice takes less than to find out."""


@dataclass(frozen=True)
class Sharing:
    """Which ranks read what one of them does."""

    on_host: Sequence[int]
    """It, and those of its host."""
    over_hosts: Sequence[int] = ()
    """All of them, host by host, if they are on several."""
    is_anywhere: bool = False
    """Whether any ranks of one host read the same: on all ranks alike."""

    @classmethod
    def of(cls, rank: int, reads: Sequence[int], hosts: Sequence[int]) -> Sharing:
        """Return that of `rank`, of the numbers by rank of what each reads, and of its host."""
        groups: dict[int, list[int]] = {}
        for other, number in enumerate(reads):
            groups.setdefault(number, []).append(other)
        is_anywhere = any(len(group) > len({hosts[each] for each in group}) for group in groups.values())
        own = sorted(groups[reads[rank]], key=lambda other: (hosts[other], other))
        on_host = [other for other in own if hosts[other] == hosts[rank]]
        return cls(on_host, own if len(own) > len(on_host) else (), is_anywhere)


class SharedReads:
    """What one rank reads, `wanted`, among what the others do; see `ReadsAlike`."""

    def __init__(self, wanted: RankReads, peers: Peers) -> None:
        self._wanted = wanted
        self._peers = peers
        self._exchange = Exchanges()
        self._relayed: RelayedReader | None = None

    def leave(self) -> None:
        """Let no other rank wait for this one, which has read what it wants, or failed. Any rank."""
        self._exchange.leave()
        if self._relayed is not None:
            self._relayed.leave()

    def is_shared(self) -> bool:
        return len(self._sharing.on_host) > 1

    def over_hosts(self, own: ReadsBlocks, alone: ReadsBlocks) -> ReadsBlocks:
        if not self._sharing.over_hosts:
            return alone
        self._relayed = RelayedReader(own, alone, Relay(self._peers, self._sharing.over_hosts))
        return self._relayed

    @contextmanager
    def exchange(self) -> Iterator[Exchanges]:
        exchange = self._met(self._sharing.on_host) if self._sharing.is_anywhere else None
        if exchange is None:
            yield self._exchange
            return
        self._exchange = exchange
        try:
            yield exchange
        finally:
            self._exchange = Exchanges()
            exchange.close()

    @cached_property
    def _sharing(self) -> Sharing:
        """Which ranks read the same: none, unless the reads of some rank are large. **Collective** at the first use."""
        peers = self._peers
        if peers.world_size == 1 or peers.max_over_ranks(_num_bytes(self._wanted))[0] < SHARED_BYTES:
            return Sharing([peers.rank])
        hosts = peers.gather_number(_text_number(host_id()))
        return Sharing.of(peers.rank, peers.gather_number(_text_number(_requests_digest(self._wanted))), hosts)

    def _met(self, ranks: Sequence[int]) -> HostExchange | None:
        """Return the exchange with the others of `ranks`; None if there are no others. **Collective**.

        No rank has one if the memory of a rank cannot be opened by another one.
        """
        peers, position = self._peers, ranks.index(self._peers.rank)
        mine = made() if 1 < len(ranks) <= MOST_RANKS else None
        with ExitStack() as stack:
            if mine is not None:
                stack.callback(mine.close)
            numbers = peers.gather_number(0 if mine is None else mine.number)
            stack.pop_all()
            rings = None if mine is None else opened_rings(mine, [numbers[rank] for rank in ranks], position)
            exchange = None if rings is None else HostExchange(rings, position)
            if exchange is not None:
                stack.callback(exchange.close)
            (has_failed,) = peers.max_over_ranks(exchange is None and len(ranks) > 1)
            if has_failed:
                return None
            stack.pop_all()
            return exchange


def _text_number(text: str) -> int:
    """Return a number of 63 bits that differs for other texts."""
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


def _num_bytes(wanted: RankReads) -> int:
    small = sum(sum(table.counts) for table in wanted.small.values())
    return small + sum(region.target.nbytes for region in wanted.regions)


def _requests_digest(wanted: RankReads) -> str:
    """Return the digest of the requests that `wanted` makes."""
    digest = xxhash.xxh3_64()
    for region in wanted.regions:
        chunk = region.chunk
        place = (region.key, chunk.file, chunk.at, chunk.offsets, region.offsets)
        # By these it is decided whether a part is read into its place, and so in which request.
        target = region.target
        memory = (tuple(target.shape), target.stride(), str(target.dtype), target.device.type)
        digest.update(repr((place, memory)).encode())
    digest.update(repr([key for key, _ in wanted.objects]).encode())
    for file, table in sorted(wanted.small.items()):
        digest.update(repr((file, table.begins, table.counts)).encode())
    return digest.hexdigest()


BATCH = 4
"""Requests that a rank reads together, so that several threads read at a time. It reads two batches ahead."""
FORWARDED = 3
"""Messages of others that may be on their way at a time. With those read ahead: 44 MiB."""
LEAST_BYTES = 16 << 20
"""Of a call; of fewer each rank reads all, because to agree takes as long."""
TRIED_BYTES = 64 << 20
"""After these it is decided whether to continue."""
_STATUS_BYTES = 8
_HAS_BYTES, _IS_LAST = 1, 2
"""Bits of the status at the end of a message: its bytes are right; after it each rank reads for itself."""


class Relay:
    """A ring of the ranks `members`, this one among them: each message goes from neighbour to neighbour.

    So each link carries a message once, and the last rank has it as soon as the pipeline is full. All ranks pass the
    same messages in the same order; then a message is behind those before it only, and no rank waits in a circle. The
    methods are **collective** for the members.
    """

    def __init__(self, peers: Peers, members: Sequence[int]) -> None:
        self._peers = peers
        self.size = len(members)
        self._members = members
        self.position = members.index(peers.rank)
        self._previous = members[self.position - 1]
        self._following = members[(self.position + 1) % self.size]

    def pass_on(self, owner: int, message: torch.Tensor) -> Callable[[], object]:
        """Fill `message` with that of the rank at position `owner`, and begin to send it on.

        Returns what waits until it was sent; before that it must not change. Raises `PeerLost`.
        """
        previous = None if owner == self.position else self._previous
        following = None if (self.position + 1) % self.size == owner else self._following
        return self._peers.relay(message, previous, following)

    def any(self, mine: bool) -> bool:
        """Return whether `mine` is true on any member.

        Each sends what it knows to the one that is 1, 2, 4, ... places on.
        """
        is_any, distance = torch.tensor([mine], device="cpu"), 1
        while distance < self.size:
            following = self._members[(self.position + distance) % self.size]
            previous = self._members[(self.position - distance) % self.size]
            sent, theirs = is_any.clone(), torch.empty_like(is_any)
            wait_until_sent = self._peers.relay(sent, None, following)
            self._peers.relay(theirs, previous, None)
            wait_until_sent()
            is_any |= theirs
            distance *= 2
        return bool(is_any)


class RelayedReader(ReadsBlocks):
    """Reads with `own`, and with the ranks in `relay`, which make the same calls in the same order. Not thread-safe.

    What is not passed on it reads with `alone`, which may share with ranks of this host.
    """

    def __init__(
        self, own: ReadsBlocks, alone: ReadsBlocks, relay: Relay, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._own, self._alone, self._relay, self._clock = own, alone, relay, clock
        self._is_over = False
        self._turn = 0
        self._pace = _Pace(clock)
        self._thread = ThreadPoolExecutor(1)
        self._failure: Exception | None = None
        """Why this rank cannot take part; the others hear of it at the next agreement."""
        try:
            self._forwarded, self._read_ahead = _Messages(FORWARDED), _Messages(2 * BATCH)
            self._thread.submit(bool).result()
        except (MemoryError, OSError, RuntimeError) as error:  # RuntimeError: no more threads.
            self._failure = error

    def read(
        self, path: Path, record: FileRecord | None, pieces: Sequence[Piece], table: PieceTable | None = None
    ) -> None:
        """Fill each of `pieces`, and those of `table`, as `BlockReader.read` does. Raises as that, and `PeerLost`."""
        if self._is_over or record is None or not record.blocks:
            self._alone.read(path, record, pieces, table)
            return
        requests = list(segments(pieces, record.size, whole_blocks=True, table=table))
        is_small = sum(request.end - request.begin for request in requests) < LEAST_BYTES
        if is_small or self._any(self._failure is not None):
            self._alone.read(path, record, pieces, table)
            return
        with self._over_after_an_error(), self._pace.running():
            missing, rest, failure = self._relayed(path, record, requests)
        if failure is not None:
            raise failure
        for request in missing:
            self._read_again(path, record, request)
        self._read_rest(path, record, rest)

    def verify(self, path: Path, record: FileRecord, blocks: Sequence[int]) -> None:
        """Check the digest of each of `blocks`. Not passed on."""
        self._own.verify(path, record, blocks)

    def leave(self) -> None:
        """End it: from now on the others read for themselves. Once, after the last `read`; raises nothing."""
        if not self._is_over:
            with suppress(PeerLost):  # What all ranks do next raises it, too.
                self._any(True)
        self._thread.shutdown()

    def _any(self, ends: bool) -> bool:
        """Return whether a rank ends it, and end it then."""
        # At the first one ranks wait until all have come.
        counted = self._pace.running() if self._pace.num_bytes else nullcontext()
        with self._over_after_an_error(), counted:
            self._is_over = self._relay.any(ends)
        return self._is_over

    @contextmanager
    def _over_after_an_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._is_over = True
            raise

    def _relayed(
        self, path: Path, record: FileRecord, requests: Sequence[Segment]
    ) -> tuple[list[Segment], Sequence[Segment], Exception | None]:
        """Fill `requests`, as far as their bytes are passed on.

        Returns those that did not come as they are, those that are not passed on, and an error of this rank, which the
        others heard of. Raises `PeerLost`.
        """
        size, position = self._relay.size, self._relay.position
        owners = [(number + self._turn) % size for number in range(len(requests))]
        self._turn += len(requests)
        checked = CheckedFile(path, record, record.size)
        own = [request for request, owner in zip(requests, owners, strict=True) if owner == position]
        missing: list[Segment] = []
        failure: Exception | None = None
        with self._reading_ahead(path, record, own) as next_own:
            for number, (request, owner) in enumerate(zip(requests, owners, strict=True)):
                if owner == position:
                    message, error = next_own()
                    failure = failure or error
                    ends = failure is not None or self._pace.is_slow()
                    message.status = (_HAS_BYTES if failure is None else 0) | (_IS_LAST if ends else 0)
                else:
                    message = self._forwarded.free(request)
                message.send = self._relay.pass_on(owner, message.tensor)
                self._pace.num_bytes += message.length
                has_bytes = bool(message.status & _HAS_BYTES)
                if not has_bytes or (owner != position and any(checked.wrong(request.begin, message.data))):
                    missing.append(request)
                else:
                    failure = failure or _filled(request, message)
                if message.status & _IS_LAST:
                    self._is_over = True
                    return missing, requests[number + 1 :], failure
        # What failed after the own last turn, the others hear when this rank leaves.
        return missing, (), failure

    @contextmanager
    def _reading_ahead(
        self, path: Path, record: FileRecord, requests: Sequence[Segment]
    ) -> Iterator[Callable[[], tuple[_Message, Exception | None]]]:
        """Yield what returns the message with the bytes of the next of `requests`, and what failed instead."""
        batches = [requests[at : at + BATCH] for at in range(0, len(requests), BATCH)]
        begun: list[tuple[list[_Message], Future[float]]] = []

        def begin() -> None:
            if len(begun) < len(batches):
                batch = batches[len(begun)]
                messages = [self._read_ahead.free(request) for request in batch]
                pieces = [Piece(request.begin, each.data) for request, each in zip(batch, messages, strict=True)]
                begun.append((messages, self._thread.submit(self._timed, path, record, pieces)))

        def ready() -> Iterator[tuple[_Message, Exception | None]]:
            for number in range(len(batches)):
                if number:
                    begin()
                messages, read = begun[number]
                error = read.exception()
                if error is not None and not isinstance(error, Exception):
                    raise error
                if error is None:
                    self._pace.note(sum(message.length for message in messages), read.result())
                for message in messages:
                    yield message, error

        waiting = ready()
        try:
            # All ranks read their first ones at the same time.
            begin()
            begin()
            yield lambda: next(waiting)
        finally:
            for _, read in begun:
                if not read.cancel():
                    read.exception()

    def _timed(self, path: Path, record: FileRecord, pieces: Sequence[Piece]) -> float:
        began = self._clock()
        self._own.read(path, record, pieces)
        return self._clock() - began

    def _read_again(self, path: Path, record: FileRecord, request: Segment) -> None:
        message = self._forwarded.free(request)
        self._own.read(path, record, [Piece(request.begin, message.data)])
        scatter(request, request.begin, message.data, message.address)

    def _read_rest(self, path: Path, record: FileRecord, requests: Sequence[Segment]) -> None:
        self._alone.read(path, record, [piece for request in requests for piece in request.pieces])
        for request in requests:
            if request.spans:
                self._read_again(path, record, request._replace(pieces=[]))


@dataclass
class _Pace:
    """How fast bytes come around, and how fast this rank reads, by `clock`."""

    clock: Callable[[], float]
    num_bytes: int = 0
    """That came around, or were its own."""
    _seconds: float = 0.0
    _began: float = 0.0
    _own_bytes: int = 0
    _own_seconds: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the block."""
        self._began = self.clock()
        try:
            yield
        finally:
            self._seconds += self.clock() - self._began

    def note(self, num_bytes: int, seconds: float) -> None:
        """Note a batch that this rank read; only the first ones count, which all ranks read at the same time."""
        if self._own_bytes < 2 * BATCH * REQUEST_BYTES:
            self._own_bytes += num_bytes
            self._own_seconds += seconds

    def is_slow(self) -> bool:
        """Return whether this rank would have read all of it by itself in less than 0.9 of the time so far."""
        if self.num_bytes < TRIED_BYTES:
            return False
        alone = self._own_seconds / self._own_bytes * self.num_bytes
        return alone < 0.9 * (self._seconds + self.clock() - self._began)


class _Message:
    """The bytes of one request, and its status."""

    def __init__(self) -> None:
        self._memory = request_memory(REQUEST_BYTES + _STATUS_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.length = 0
        self.send: Callable[[], object] = bool
        """Waits until it was sent."""

    @property
    def data(self) -> memoryview:
        return self._memory[: self.length]

    @property
    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=self.length + _STATUS_BYTES)

    @property
    def status(self) -> int:
        return self._memory[self.length]

    @status.setter
    def status(self, value: int) -> None:
        self._memory[self.length] = value


class _Messages:
    """Memory for `count` messages, which are used in turn. Raises MemoryError and OSError."""

    def __init__(self, count: int) -> None:
        self._all = [_Message() for _ in range(count)]
        self._next = 0

    def free(self, request: Segment) -> _Message:
        """Return a message with room for `request`, once it was sent for which that was used before."""
        message = self._all[self._next % len(self._all)]
        self._next += 1
        message.send()
        message.send = bool
        message.length = request.end - request.begin
        return message


def _filled(request: Segment, message: _Message) -> Exception | None:
    """Fill the pieces of `request`; return what failed."""
    try:
        scatter(request, request.begin, message.data, message.address)
    except Exception as error:
        return error
    return None
