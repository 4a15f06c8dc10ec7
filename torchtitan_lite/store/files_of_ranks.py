"""The files of a checkpoint of many ranks, in columns: an object for each would take every rank a second to read."""

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


class FilesOfRanks(Mapping[str, FileRecord]):
    """The file of tensors of each rank and the file of its record, by name.

    A rank has both or neither; only the record has digests here, and in it are those of the other.
    """

    def __init__(self, sizes: Sequence[int | None], record_sizes: Sequence[int | None], digests: bytes) -> None:
        self.sizes = sizes
        """By rank: bytes of its file of tensors, None if it wrote none."""
        self._record_sizes = record_sizes
        self._digests = digests
        """Those of the blocks of all records, by rank."""

    def to_json(self) -> str:
        """Return the field of the manifest; equal files give equal text."""
        columns = {"sizes": [*self.sizes], "record_sizes": [*self._record_sizes], "digests": self._digests.hex()}
        return json.dumps(columns, separators=(",", ":"))

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> FilesOfRanks:
        """Return what `to_json` wrote. Raise ValueError for anything else."""
        sizes, record_sizes = (_sizes(document, name) for name in ("sizes", "record_sizes"))
        if [size is None for size in sizes] != [size is None for size in record_sizes]:
            raise ValueError("expected sizes and record_sizes of the same ranks")
        digests = bytes.fromhex(value_of(document, "digests", str))
        blocks = sum(map(num_blocks, filter(None, record_sizes)))
        if len(digests) != DIGEST_BYTES * blocks:
            raise ValueError(f"digests: expected those of {blocks} blocks, found {len(digests)} bytes")
        return cls(sizes, record_sizes, digests)

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(filter(None, self.sizes)) + sum(filter(None, self._record_sizes))

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
        if not is_record:
            return FileRecord(size)
        begin, end = self._ends[rank], self._ends[rank + 1]
        return FileRecord(size, self._digests[DIGEST_BYTES * begin : DIGEST_BYTES * end])

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return 2 * (len(self.sizes) - self.sizes.count(None))

    @cached_property
    def _ends(self) -> Sequence[int]:
        """How many digests the ranks below each one have together."""
        return [0, *accumulate(num_blocks(size or 0) for size in self._record_sizes)]


Files: TypeAlias = dict[str, FileRecord] | ChainMap[str, FileRecord]
"""The record of each file by name; where some are in columns, the last map of a ChainMap is `FilesOfRanks`."""


def together(others: dict[str, FileRecord], of_ranks: FilesOfRanks) -> Files:
    """Return all of them."""
    return ChainMap(others, of_ranks)  # type: ignore[arg-type]  # a ChainMap changes only its first map


def in_columns(files: Files) -> tuple[dict[str, FileRecord], FilesOfRanks | None]:
    """Return those of `files` that are not in columns, and those that are.

    Of the second also those whose digests were added from records are only there.
    """
    *others, last = files.maps if isinstance(files, ChainMap) else [files]
    if not isinstance(last, FilesOfRanks):
        return dict(files), None
    return {name: record for name, record in ChainMap(*others).items() if name not in last}, last


def recorded_sizes(files: Mapping[str, FileRecord]) -> dict[str, int]:
    """Return the bytes of each of `files` by name."""
    others, of_ranks = in_columns(files) if isinstance(files, ChainMap) else (files, None)
    by_name = {} if of_ranks is None else dict(of_ranks.by_name)
    return by_name | {name: record.size for name, record in others.items()}


def _sizes(document: dict[str, Any], name: str) -> list[int | None]:
    sizes: list[int | None] = value_of(document, name, list)
    if not {*map(type, sizes)} <= {int, type(None)} or not all(
        0 <= size < 1 << 63 for size in sizes if size is not None
    ):
        raise ValueError(f"{name}: expected sizes in bytes, found something else")
    return sizes
