"""What each rank of a large job writes down itself, in a file next to its tensors: its record.

The digests of blocks grow with the bytes of the state, and the entries that only one rank has with the ranks: in one
manifest, which every rank reads, they would be tens of megabytes. From `FROM_RANKS` ranks on each rank keeps them in a
record, and the manifest has the digest of that. A rank reads the records of the files that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan_lite.disk.block_reader import DamagedRange
from torchtitan_lite.disk.digest import DIGEST_BYTES, FileRecord, num_blocks
from torchtitan_lite.disk.read_requests import Piece, ReadsBlocks
from torchtitan_lite.errors import CheckpointDamaged
from torchtitan_lite.store import layout
from torchtitan_lite.store.described import allowed_description_bytes
from torchtitan_lite.store.manifest import Manifest, Table
from torchtitan_lite.store.manifest_fields import bare, json_object, value_of

FROM_RANKS = 256
"""With fewer ranks all is in the manifest, and a load reads no further file for each.

For 256 ranks of an 8B state the records take 0.22 MB of 1.69 out of the manifest. Of a small model on one rank, a save
takes 10.1 ms with a record and 9.1 without, and a load 11.6 and 10.2; and DCP's readers do not see what is in records.
"""


SizesOf = Callable[[Iterable[str]], Mapping[str, int]]


@dataclass(frozen=True)
class RankRecord:
    """The record of one rank."""

    blocks: bytes
    """The digests of the blocks of its file."""
    objects: Table = field(default_factory=Table)
    tensors: Table = field(default_factory=Table)
    structure: Table = field(default_factory=Table)
    """The entries that no other rank has, as in the tables of the manifest."""

    def to_json(self) -> bytes:
        """Return the contents of the file; equal records give equal bytes."""
        texts = Table.texts(self.objects, self.tensors, self.structure)
        return b'{\n"blocks": "%s",\n"objects": %s,\n"tensors": %s,\n"structure": %s\n}\n' % (
            self.blocks.hex().encode(),
            *texts,
        )

    @classmethod
    def parse(cls, data: bytes) -> RankRecord:
        """Return the record in `data`. Raise ValueError for anything else."""
        document = json_object(data)
        tables = (Table(value_of(document, name, dict)) for name in ("objects", "tensors", "structure"))
        return cls(bytes.fromhex(value_of(document, "blocks", str)), *tables)


class RecordsOfRanks(Mapping[str, FileRecord]):
    """The records of the ranks that wrote the checkpoint `folder`, which `manifest` describes; each is read once.

    As a mapping, the size and the digests of each file of the checkpoint, where these are in a record read as needed.
    `reader` reads the files that `path_of` gives for their names; `sizes_of` returns the sizes of those that exist. Any
    thread.
    """

    def __init__(
        self, manifest: Manifest, folder: str, reader: ReadsBlocks, path_of: Callable[[str], Path], sizes_of: SizesOf
    ) -> None:
        self._manifest, self._folder = manifest, folder
        self._reader, self._path_of, self._sizes_of = reader, path_of, sizes_of
        self._read: dict[str, RankRecord] = {}

    def __getitem__(self, name: str) -> FileRecord:
        known = self._manifest.files[name]
        if known.blocks or not self.has(name):
            return known
        return FileRecord(known.size, self.of(name).blocks)

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.files)

    def __len__(self) -> int:
        return len(self._manifest.files)

    @property
    def files(self) -> list[str]:
        """The files of tensors whose ranks have a record."""
        return [name for name in self._manifest.files if self.has(name)]

    def has(self, file: str) -> bool:
        """Return whether the rank that wrote the file of tensors `file` has a record."""
        rank = layout.rank_of(file)
        return rank is not None and layout.record_file(rank) in self._manifest.files

    def of(self, file: str) -> RankRecord:
        """Return the record of the rank that wrote the file of tensors `file`.

        Raises `CheckpointDamaged` unless it is what was committed, and what the reader raises else.
        """
        if file not in self._read:
            rank = layout.rank_of(file) or 0
            name = layout.record_file(rank)
            try:
                record = RankRecord.parse(self._bytes_of(name, self._manifest.files[file].size))
                _check_keys(record, rank)
                if len(record.blocks) != DIGEST_BYTES * num_blocks(self._manifest.files[file].size):
                    raise ValueError(f"it has {len(record.blocks)} bytes of digests, for another size of {file}")
            except (DamagedRange, ValueError, RecursionError) as error:
                finding = error.finding if isinstance(error, DamagedRange) else str(error)
                raise CheckpointDamaged(self._folder, f"{name}: {finding}") from None
            self._read[file] = record
        return self._read[file]

    def _bytes_of(self, name: str, data_bytes: int) -> bytes:
        known = self._manifest.files[name]
        found = self._sizes_of([name]).get(name)
        # Before memory is allocated.
        if found != known.size:
            raise ValueError("it is missing" if found is None else f"it has {found} bytes, not {known.size}")
        if known.size > (most := allowed_description_bytes(data_bytes)) or not known.blocks:
            raise ValueError(f"expected at most {most} bytes with digests, found {known.size}")
        data = bytearray(known.size)
        with memoryview(data) as view:
            self._reader.read(self._path_of(name), known, [Piece(0, view)])
        return bytes(data)


def _check_keys(record: RankRecord, rank: int) -> None:
    """Raise ValueError for an entry that does not have the number of `rank` in its name: others might have it, too."""
    for key in (*record.tensors, *record.objects):
        if f".rank{rank}." not in f"{key}.":
            raise ValueError(f"{bare(key)} is no entry of rank {rank} alone")
