"""Which ranks of one host read the same bytes, so that these are read once.

Ranks of DDP have equal plans, as have those with the same shard under HSDP. From a disk they read through the page
cache: the first one that asks for a page reads it, and the others, which ask in the same order, wait for that page and
copy it. Nothing else joins them: a rank that fails, or is late, delays no other one. What one rank alone reads stays
out of the page cache: to make room for it there takes longer than to read it. From an object store each rank fetches a
part, and gives it to the others (host_exchange.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import xxhash

from torchtitan_lite.checkpoint.reading.reader import RankReads
from torchtitan_lite.distributed.host_exchange import MOST_RANKS, Alone, Exchanges, HostExchange, made, opened
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.host_memory import host_id

SHARED_BYTES = 64 << 20
"""Below this, to read twice takes less than to find out."""


class SharedReads:
    """What one rank reads, `wanted`, among what the others do; see `ReadsAlike`."""

    def __init__(self, wanted: RankReads, peers: Peers) -> None:
        self._wanted = wanted
        self._peers = peers
        self._exchange: Exchanges = Alone()

    def leave(self) -> None:
        """Let no other rank wait for this one, which has read what it wants, or failed. Any rank."""
        self._exchange.leave()

    def is_shared(self) -> bool:
        return len(self._sharing()[0]) > 1

    @contextmanager
    def exchange(self) -> Iterator[Exchanges]:
        ranks, is_anywhere = self._sharing()
        exchange = self._met(ranks) if is_anywhere else None
        if exchange is None:
            yield self._exchange
            return
        self._exchange = exchange
        try:
            yield exchange
        finally:
            self._exchange = Alone()
            exchange.close()

    def _sharing(self) -> tuple[list[int], bool]:
        """Return the ranks of this host that read the same, and whether any ranks of the job do. **Collective**.

        Both are for reads that are large on some rank. The first has this rank; the second is the same on all.
        """
        peers = self._peers
        if peers.world_size == 1 or peers.max_over_ranks(_num_bytes(self._wanted))[0] < SHARED_BYTES:
            return [peers.rank], False
        numbers = peers.gather_number(xxhash.xxh3_64_intdigest(f"{host_id()} {_digest(self._wanted)}".encode()) >> 1)
        ranks = [rank for rank, number in enumerate(numbers) if number == numbers[peers.rank]]
        return ranks, len({*numbers}) < len(numbers)

    def _met(self, ranks: list[int]) -> HostExchange | None:
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
