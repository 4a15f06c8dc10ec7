"""The files of many ranks in one field of the manifest: what is read is what was written, and nothing else is read."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.store.a_manifest import MANIFEST, sealed
from torchtitan_lite.disk.digest import BLOCK_BYTES, DIGEST_BYTES, FileRecord, num_blocks
from torchtitan_lite.errors import CheckpointDamaged
from torchtitan_lite.store import layout
from torchtitan_lite.store.files_of_ranks import FilesOfRanks, recorded_sizes, with_rank_files
from torchtitan_lite.store.manifest import Manifest

WROTE = st.tuples(st.integers(0, 1 << 62), st.integers(0, 3 * BLOCK_BYTES))


def digests_of(size: int, rank: int) -> bytes:
    return bytes([rank + 1]) * (DIGEST_BYTES * num_blocks(size))


def in_columns(by_rank: list[tuple[int, int] | None]) -> FilesOfRanks:
    """Return the files of ranks by the sizes of their files and records; None: it wrote none."""
    pairs = [pair or (None, None) for pair in by_rank]
    records = [record for _, record in pairs]
    digests = b"".join(digests_of(size, rank) for rank, size in enumerate(records) if size is not None)
    return FilesOfRanks([size for size, _ in pairs], records, digests)


def one_by_one(by_rank: list[tuple[int, int] | None]) -> dict[str, FileRecord]:
    wrote = [(rank, *pair) for rank, pair in enumerate(by_rank) if pair is not None]
    files = {layout.data_file(rank, 0): FileRecord(size) for rank, size, _ in wrote}
    return files | {layout.record_file(rank): FileRecord(size, digests_of(size, rank)) for rank, _, size in wrote}


@given(st.lists(st.none() | WROTE, max_size=12))
def test_columns_are_the_files_of_each_rank(by_rank: list[tuple[int, int] | None]) -> None:
    columns, files = in_columns(by_rank), one_by_one(by_rank)
    assert dict(columns) == files
    assert len(columns) == len(files)
    for name in ("__99_0.distcp", "__0_1.distcp", "__00_0.json", "__-1_0.json", ".metadata", "a"):
        assert name not in columns


@given(st.lists(st.none() | WROTE, max_size=12))
def test_a_manifest_with_columns_is_read_back_as_it_was_written(by_rank: list[tuple[int, int] | None]) -> None:
    others = {".metadata": FileRecord.of(b"of dcp")}
    manifest = dataclasses.replace(MANIFEST, files=with_rank_files({**others}, in_columns(by_rank)))
    again = Manifest.parse(manifest.to_json())
    assert again == manifest
    assert again.to_json() == manifest.to_json()
    assert again.nbytes == sum(recorded_sizes(again.files).values())
    assert recorded_sizes(again.files) == {name: record.size for name, record in again.files.items()}
    with_one = dataclasses.replace(again, files=again.files | {"more": FileRecord(1)})
    assert Manifest.parse(with_one.to_json()).files["more"] == FileRecord(1)


def test_a_rank_of_any_number_takes_no_column_for_each_rank_below_it() -> None:
    files = {layout.data_file(rank, 0): FileRecord.of(b"data") for rank in (0, (1 << 16) - 1, 1 << 16, 5_000_000_000)}
    manifest = dataclasses.replace(MANIFEST, files={**files})
    document = json.loads(manifest.to_json())
    assert {*document["files"]} == {"__65536_0.distcp", "__5000000000_0.distcp"}
    assert len(document["files_of_ranks"]["sizes"]) == 1 << 16
    assert dict(Manifest.parse(manifest.to_json()).files) == files


ONE = {"sizes": [8], "record_sizes": [20], "digests": "aa" * 8}


@pytest.mark.parametrize(
    ("field", "finding"),
    [
        ([], "files_of_ranks: expected dict, found list"),
        (ONE | {"sizes": 8}, "sizes: expected list, found int"),
        (ONE | {"sizes": [-1]}, "sizes: expected sizes in bytes"),
        (ONE | {"sizes": [1 << 63]}, "sizes: expected sizes in bytes"),
        (ONE | {"sizes": [True]}, "sizes: expected sizes in bytes"),
        (ONE | {"record_sizes": ["20"]}, "record_sizes: expected sizes in bytes"),
        (ONE | {"record_sizes": [20, 20]}, "expected sizes and record_sizes of the same ranks"),
        (ONE | {"sizes": [None]}, "expected sizes and record_sizes of the same ranks"),
        (ONE | {"digests": ""}, "digests: expected those of 1 blocks, found 0 bytes"),
        (ONE | {"digests": "aa" * 16}, "digests: expected those of 1 blocks, found 16 bytes"),
        (ONE | {"digests": "x"}, "non-hexadecimal number"),
        (ONE | {"record_sizes": [], "digests": ""}, "digests: expected those of 1 blocks, found 0 bytes"),
        ({"sizes": [8], "record_sizes": [20]}, "digests: expected str, found nothing"),
    ],
)
def test_wrong_columns_are_damage_and_are_named(field: Any, finding: str) -> None:
    document = json.loads(dataclasses.replace(MANIFEST, files={}).to_json())
    with pytest.raises(CheckpointDamaged) as caught:
        Manifest.parse(sealed(document | {"files_of_ranks": field}))
    assert finding in caught.value.finding


def test_a_file_in_both_fields_is_damage() -> None:
    document = json.loads(MANIFEST.to_json()) | {"files": {"__0_0.distcp": {"size": 10}}}
    with pytest.raises(CheckpointDamaged, match=r"__0_0\.distcp is in files_of_ranks, too"):
        Manifest.parse(sealed(document | {"files_of_ranks": ONE}))
