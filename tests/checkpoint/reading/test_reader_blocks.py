"""Which bytes of a checkpoint are read and verified, and which keys an error names where they are damaged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.with_manifest import write_manifest
from tests.store.filled import flip
from torchtitan_lite.checkpoint.format.torch_item import object_item
from torchtitan_lite.checkpoint.reading import reader
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.checkpoint.reading.reader import CheckpointReader
from torchtitan_lite.checkpoint.reading.regions import RankReads, Region
from torchtitan_lite.disk.block_reader import BlockReader
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord
from torchtitan_lite.disk.read_requests import Piece, PieceTable
from torchtitan_lite.errors import CheckpointDamaged

DATA = "__0_0.distcp"
PLACES = {
    "first": (0, BLOCK_BYTES),  # All of block 0 and nothing of block 1.
    "second": (BLOCK_BYTES, BLOCK_BYTES - 8),
    "across": (2 * BLOCK_BYTES - 8, 16),  # The end of block 1, the beginning of block 2.
    "empty": (4 * BLOCK_BYTES + 100, 0),
    "last": (5 * BLOCK_BYTES + 20, 80),
}
"""Key to first byte and number of bytes: blocks 3 and 4 hold no tensor, and block 5 is short."""
OBJECT_AT = 3 * BLOCK_BYTES - 512
NEXT_AT = 4 * BLOCK_BYTES
"""Another object, that begins where a block does."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a checkpoint of three files: the second has two blocks, the third holds no tensor and no object."""
    item = object_item(list(range(200)))
    assert 512 < len(item) < BLOCK_BYTES, "it ends in block 3"
    data = bytearray((bytes(range(251)) * (BLOCK_BYTES // 50 + 1))[: 5 * BLOCK_BYTES + 100])
    for at in (OBJECT_AT, NEXT_AT):
        data[at : at + len(item)] = item
    files = {DATA: bytes(data), "__1_0.distcp": bytes(data[: BLOCK_BYTES + 10]), "__2_0.distcp": bytes(10)}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    tensors: dict[str, Any] = {
        key: {"dtype": "uint8", "shape": [size], "path": [key], "chunks": [[DATA, at, [0], [size]]]}
        for key, (at, size) in PLACES.items()
    }
    another = {"dtype": "uint8", "shape": [8], "path": ["another"], "chunks": [["__1_0.distcp", 0, [0], [8]]]}
    objects = {
        key: {"path": [key], "item": [DATA, at, len(item)]} for key, at in (("numbers", OBJECT_AT), ("next", NEXT_AT))
    }
    write_manifest(tmp_path, files, tensors | {"another": another}, objects)
    return tmp_path


class Noting(BlockReader):
    """Records the reads and the blocks that are verified."""

    def __init__(self) -> None:
        super().__init__()
        self.noted_reads: list[tuple[str, int, int]] = []
        self.noted_blocks: list[tuple[str, int]] = []

    def read(
        self, path: Path, record: FileRecord | None, pieces: Sequence[Piece], table: PieceTable | None = None
    ) -> None:
        self.noted_reads += [(path.name, len(pieces), sum(len(piece.into) for piece in pieces))]
        super().read(path, record, pieces, table)

    def verify(self, path: Path, record: FileRecord, blocks: Sequence[int]) -> None:
        self.noted_blocks += [(path.name, block) for block in blocks]
        super().verify(path, record, blocks)


def regions(folder: Path, *keys: str, dtype: torch.dtype = torch.uint8) -> list[Region]:
    tensors = CheckpointFolder(folder).contents.tensors
    chunks = {key: tensors[key].chunks[0] for key in keys}
    return [Region(key, chunk, (0,), torch.zeros(chunk.sizes, dtype=dtype)) for key, chunk in chunks.items()]


def keys_damaged(folder: Path, wanted: RankReads) -> list[str]:
    """Read `wanted`, and return the keys that the error for damage names; none if there is no damage."""
    try:
        CheckpointReader(folder).read(wanted)
    except CheckpointDamaged as error:
        return sorted(error.keys)
    return []


@pytest.mark.parametrize(
    ("at", "wanted", "affected"),
    [
        (0, ["first"], ["first"]),
        (BLOCK_BYTES - 1, ["first"], ["first"]),
        (BLOCK_BYTES - 1, ["second", "across", "last"], []),
        (BLOCK_BYTES, ["second"], ["across", "second"]),
        (BLOCK_BYTES, ["first", "last"], []),
        (2 * BLOCK_BYTES - 1, ["across"], ["across", "second"]),
        (2 * BLOCK_BYTES, ["across"], ["across", "numbers"]),
        (5 * BLOCK_BYTES, ["last"], ["last"]),
        (5 * BLOCK_BYTES + 99, ["last"], ["last"]),
        (5 * BLOCK_BYTES, ["empty"], []),
    ],
)
def test_damage_is_found_by_a_read_of_its_block_and_named_with_all_keys_in_it(
    folder: Path, at: int, wanted: list[str], affected: list[str]
) -> None:
    flip(folder / DATA, at)
    assert keys_damaged(folder, RankReads(regions(folder, *wanted))) == affected


def test_damage_of_an_object_is_found_by_a_read_of_it(folder: Path) -> None:
    taken: list[Any] = []
    wanted = RankReads(objects=[("numbers", taken.append)])
    assert keys_damaged(folder, wanted) == []
    assert taken == [list(range(200))]
    flip(folder / DATA, 3 * BLOCK_BYTES + 10)
    assert keys_damaged(folder, wanted) == ["numbers"]


def test_damage_of_one_file_does_not_name_keys_at_the_same_place_of_another(folder: Path) -> None:
    flip(folder / "__1_0.distcp", 4)
    assert keys_damaged(folder, RankReads(regions(folder, *PLACES))) == []
    assert keys_damaged(folder, RankReads(regions(folder, "another"))) == ["another"]


def test_the_rest_is_every_block_without_a_tensor(folder: Path) -> None:
    """With a read of all tensors, every byte is verified, most of them once."""
    noting = Noting()
    CheckpointReader(folder, blocks=noting).verify_rest(0, 1)
    rest = [(DATA, 3), (DATA, 4), ("__1_0.distcp", 1), ("__2_0.distcp", 0)]
    assert sorted(noting.noted_blocks) == rest


@pytest.mark.parametrize("count", [2, 3, 5])
def test_each_file_of_the_rest_is_verified_by_one_rank(folder: Path, count: int) -> None:
    together: list[tuple[str, int]] = []
    for number in range(count):
        noting = Noting()
        CheckpointReader(folder, blocks=noting).verify_rest(number, count)
        files = {name for name, _ in noting.noted_blocks}
        assert len(files) <= -(-len(names(folder)) // count)
        together += noting.noted_blocks
    alone = Noting()
    CheckpointReader(folder, blocks=alone).verify_rest(0, 1)
    assert sorted(together) == sorted(alone.noted_blocks)


@pytest.mark.parametrize("at", [4 * BLOCK_BYTES + 50, 3 * BLOCK_BYTES + 100_000])
def test_damage_outside_all_tensors_is_found_in_the_rest(folder: Path, at: int) -> None:
    flip(folder / DATA, at)
    assert keys_damaged(folder, RankReads(regions(folder, "first", "second", "across", "last"))) == []
    with pytest.raises(CheckpointDamaged, match=f"of {DATA}: "):
        CheckpointReader(folder).verify_rest(0, 1)
    CheckpointReader(folder, "size").verify_rest(0, 1)


def test_staged_parts_are_read_in_batches_of_bounded_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BATCH_BYTES", 96)
    wanted = regions(folder, "across", "last", "another", dtype=torch.float32)
    noting = Noting()
    CheckpointReader(folder, blocks=noting).read(RankReads(wanted))
    assert noting.noted_reads == [(DATA, 2, 96), ("__1_0.distcp", 1, 8)]
    monkeypatch.setattr(reader, "BATCH_BYTES", 95)
    noting = Noting()
    CheckpointReader(folder, blocks=noting).read(RankReads(wanted))
    assert noting.noted_reads == [(DATA, 1, 16), (DATA, 1, 80), ("__1_0.distcp", 1, 8)]
    data = (folder / DATA).read_bytes()
    for region in wanted[:2]:
        at, size = PLACES[region.key]
        assert region.target.tolist() == list(data[at : at + size])


def test_one_part_that_is_larger_than_a_batch_is_a_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BATCH_BYTES", 1)
    wanted = regions(folder, "first", dtype=torch.float32)
    CheckpointReader(folder).read(RankReads(wanted))
    assert wanted[0].target.tolist() == list((folder / DATA).read_bytes()[:BLOCK_BYTES])


def names(folder: Path) -> list[str]:
    """Return the files with a record in the manifest."""
    return sorted(CheckpointFolder(folder).records)
