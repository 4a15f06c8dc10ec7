"""The files that ranks wrote, in columns: objects would take every rank of a large job a second to read."""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias

from torchtitan_lite.disk.digest import DIGEST_BYTES, FileRecord, num_blocks
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest_fields import value_of

_MOST_RANKS = 1 << 16
"""In columns, which have a place for each rank below the last one: a manifest may name any number."""


class FilesOfRanks(Mapping[str, FileRecord]):
    """The file of tensors of each rank, and the file of its record where ranks have records, by name.

    A rank has both or neither. The digests are those of its record, which has those of the other; without records,
    those of its file of tensors.
    """

    def __init__(self, sizes: Sequence[int | None], record_sizes: Sequence[int | None], digests: bytes) -> None:
        self.sizes = sizes
        """By rank: bytes of its file of tensors, None if it wrote none."""
        self._record_sizes = record_sizes
        """The same of its record; empty where ranks have no records."""
        self._digests = digests
        """Of the blocks of all ranks, by rank."""

    @property
    def have_records(self) -> bool:
        """Return whether the ranks have records."""
        return bool(self._record_sizes)

    def to_json(self) -> str:
        """Return the field of the manifest; equal files give equal text."""
        columns = {"sizes": [*self.sizes], "record_sizes": [*self._record_sizes], "digests": self._digests.hex()}
        return json.dumps(columns, separators=(",", ":"))

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> FilesOfRanks:
        """Return what `to_json` wrote. Raise ValueError for anything else."""
        sizes, record_sizes = (_size_column(document, name) for name in ("sizes", "record_sizes"))
        if record_sizes and [size is None for size in sizes] != [size is None for size in record_sizes]:
            raise ValueError("expected sizes and record_sizes of the same ranks")
        digests = bytes.fromhex(value_of(document, "digests", str))
        blocks = sum(map(num_blocks, filter(None, record_sizes or sizes)))
        if len(digests) != DIGEST_BYTES * blocks:
            raise ValueError(f"digests: expected those of {blocks} blocks, found {len(digests)} bytes")
        return cls(sizes, record_sizes, digests)

    @cached_property
    def by_name(self) -> Mapping[str, int]:
        """The bytes of each file by name."""
        found = {layout.data_file(rank, 0): size for rank, size in enumerate(self.sizes) if size is not None}
        found |= {layout.record_file(rank): size for rank, size in enumerate(self._record_sizes) if size is not None}
        return found

    def __getitem__(self, name: str) -> FileRecord:
        rank, is_record = layout.parse_rank_file(name) or (-1, False)
        sizes = self._record_sizes if is_record else self.sizes
        size = sizes[rank] if 0 <= rank < len(sizes) else None
        if size is None:
            raise KeyError(name)
        if not is_record and self.have_records:
            return FileRecord(size)
        begin, end = self._ends[rank], self._ends[rank + 1]
        return FileRecord(size, self._digests[DIGEST_BYTES * begin : DIGEST_BYTES * end])

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)

    @cached_property
    def _ends(self) -> Sequence[int]:
        """How many digests the ranks below each one have together."""
        return [0, *accumulate(num_blocks(size or 0) for size in self._record_sizes or self.sizes)]


Files: TypeAlias = dict[str, FileRecord] | ChainMap[str, FileRecord]
"""The record of each file by name; where some are in columns, the last map of a ChainMap is `FilesOfRanks`."""


def with_rank_files(others: dict[str, FileRecord], of_ranks: FilesOfRanks) -> Files:
    """Return all of them."""
    return ChainMap(others, of_ranks)  # type: ignore[arg-type]  # a ChainMap changes only its first map


def in_columns(files: Files) -> tuple[dict[str, FileRecord], FilesOfRanks]:
    """Return those of `files` that no rank of the first `_MOST_RANKS` wrote, and the columns of the others.

    A file whose digests were added from its rank's record is in the columns alone. One without digests is in neither
    column: it counts among the first.
    """
    *others, last = files.maps if isinstance(files, ChainMap) else [files]
    if isinstance(last, FilesOfRanks):
        return {name: record for name, record in ChainMap(*others).items() if name not in last}, last
    by_rank: dict[int, FileRecord] = {}
    rest: dict[str, FileRecord] = {}
    for name, record in files.items():
        rank, is_record = layout.parse_rank_file(name) or (-1, True)
        if is_record or rank >= _MOST_RANKS or (record.size and not record.blocks):
            rest[name] = record
        else:
            by_rank[rank] = record
    in_order = [by_rank.get(rank) for rank in range(max(by_rank, default=-1) + 1)]
    digests = b"".join(record.blocks for record in in_order if record is not None)
    return rest, FilesOfRanks([None if record is None else record.size for record in in_order], [], digests)


def recorded_sizes(files: Mapping[str, FileRecord]) -> dict[str, int]:
    """Return the bytes of each of `files` by name."""
    if not isinstance(files, ChainMap):
        return {name: record.size for name, record in files.items()}
    others, of_ranks = in_columns(files)
    return {**of_ranks.by_name, **{name: record.size for name, record in others.items()}}


def _size_column(document: dict[str, Any], name: str) -> list[int | None]:
    sizes: list[int | None] = value_of(document, name, list)
    if not {*map(type, sizes)} <= {int, type(None)} or not all(
        0 <= size < 1 << 63 for size in sizes if size is not None
    ):
        raise ValueError(f"{name}: expected sizes in bytes, found something else")
    return sizes
