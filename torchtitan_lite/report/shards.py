"""How the bytes of one checkpoint are spread over the ranks that wrote it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_lite.checkpoint.examining.opened import open_checkpoint
from torchtitan_lite.checkpoint.examining.summary import bytes_by_file
from torchtitan_lite.errors import TorchtitanLiteError
from torchtitan_lite.store import layout
from torchtitan_lite.store.place import Place

OTHER = "other"
MAX_PARTS = 4


@dataclass(frozen=True)
class ShardMap:
    """The bytes of one checkpoint by rank, and in each rank by part of the state."""

    step: int
    ranks: Mapping[int, Mapping[str, int]]
    """Rank to part to bytes, by ascending rank. All parts of a rank sum to its files."""
    parts: tuple[str, ...]
    """The largest parts first; the last one may be `OTHER`."""

    @property
    def totals(self) -> dict[int, int]:
        """Bytes by rank."""
        return {rank: sum(parts.values()) for rank, parts in self.ranks.items()}


def read_shards(folder: Place, step: int) -> ShardMap | None:
    """Return the shard map of the checkpoint in `folder`; None if it cannot be read. No tensor is read."""
    try:
        opened = open_checkpoint(folder)
        by_file = bytes_by_file(opened.contents)
    except (TorchtitanLiteError, OSError):
        return None
    return shard_map(step, opened.sizes, by_file)


def shard_map(step: int, sizes: Mapping[str, int], by_file: Mapping[str, Mapping[str, int]]) -> ShardMap | None:
    """Return the shard map of files with these `sizes` and tensors; None without a file of a rank."""
    totals: Counter[str] = Counter()
    for parts in by_file.values():
        totals.update(parts)
    named = [part for part, _ in totals.most_common(MAX_PARTS - 1)]
    ranks: dict[int, Counter[str]] = {}
    for name, size in sizes.items():
        if (rank := layout.rank_of(name)) is None:
            continue
        found = ranks.setdefault(rank, Counter())
        parts = {part: nbytes for part, nbytes in by_file.get(name, {}).items() if part in named}
        found.update(parts)
        # What is next to the tensors, headers and padding for the most part.
        found[OTHER] += max(0, size - sum(parts.values()))
    if not ranks:
        return None
    has_other = any(parts[OTHER] for parts in ranks.values())
    return ShardMap(step, dict(sorted(ranks.items())), (*named, OTHER) if has_other else tuple(named))
