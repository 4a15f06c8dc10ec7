"""Which ranks of one host read the same bytes, so that these are read once.

Ranks of DDP have equal plans, as have those with the same shard under HSDP. From a disk they read through the page
cache: the first one that asks for a page reads it, and the others, which ask in the same order, wait for that page and
copy it. Nothing else joins them: a rank that fails, or is late, delays no other one. What one rank alone reads stays
out of the page cache: to make room for it there takes longer than to read it. From an object store each rank fetches a
part, and gives it to the others (host_exchange.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property

import xxhash

from torchtitan_lite.checkpoint.reading.reader import RankReads
from torchtitan_lite.checkpoint.reading.relayed_reads import RelayedReader
from torchtitan_lite.disk.reads_blocks import ReadsBlocks
from torchtitan_lite.distributed.host_exchange import MOST_RANKS, Exchanges, HostExchange, made, opened
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.distributed.relay import Relay
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
        hosts = peers.gather_number(_number(host_id()))
        return Sharing.of(peers.rank, peers.gather_number(_number(_digest(self._wanted))), hosts)

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
            rings = None if mine is None else opened(mine, [numbers[rank] for rank in ranks], position)
            exchange = None if rings is None else HostExchange(rings, position)
            if exchange is not None:
                stack.callback(exchange.close)
            (has_failed,) = peers.max_over_ranks(exchange is None and len(ranks) > 1)
            if has_failed:
                return None
            stack.pop_all()
            return exchange


def _number(text: str) -> int:
    """Return a number of 63 bits that differs for other texts."""
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


def _num_bytes(wanted: RankReads) -> int:
    small = sum(sum(table.counts) for table in wanted.small.values())
    return small + sum(region.target.nbytes for region in wanted.regions)


def _digest(wanted: RankReads) -> str:
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
