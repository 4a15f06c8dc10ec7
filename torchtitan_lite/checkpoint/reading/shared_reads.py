"""Whether ranks of one host read the same bytes, which the page cache then gives to all of them.

Ranks of DDP have equal plans, as have those with the same shard under HSDP. Past the page cache each of them would read
the disk. Through it the first one that asks for a page reads it, and the others, which ask in the same order, wait for
that page and copy it. Nothing else joins them: a rank that fails, or is late, delays no other one. What one rank alone
reads stays out of the page cache: to make room for it there takes longer than to read it.
"""

from __future__ import annotations

import xxhash

from torchtitan_lite.checkpoint.reading.reader import RankReads
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.host_memory import host_id

SHARED_BYTES = 64 << 20
"""Below this, to read twice takes less than to find out."""


def are_shared(wanted: RankReads, peers: Peers) -> bool:
    """Return whether another rank of this host reads exactly what this one does, and it is much. **Collective**."""
    if peers.world_size == 1:
        return False
    (most,) = peers.max_over_ranks(_num_bytes(wanted))
    if most < SHARED_BYTES:
        return False
    mine = xxhash.xxh3_64_intdigest(f"{host_id()} {_digest(wanted)}".encode()) >> 1
    return peers.gather_number(mine).count(mine) > 1


def _num_bytes(wanted: RankReads) -> int:
    small = sum(sum(table.counts) for table in wanted.small.values())
    return small + sum(region.target.nbytes for region in wanted.regions)


def _digest(wanted: RankReads) -> str:
    """Return the digest of the places in files that `wanted` has, whatever memory they go to."""
    digest = xxhash.xxh3_64()
    for region in wanted.regions:
        chunk = region.chunk
        place = (region.key, chunk.file, chunk.at, chunk.offsets, region.offsets, tuple(region.target.shape))
        digest.update(repr(place).encode())
    for file, table in sorted(wanted.small.items()):
        digest.update(repr((file, table.begins, table.counts)).encode())
    return digest.hexdigest()
