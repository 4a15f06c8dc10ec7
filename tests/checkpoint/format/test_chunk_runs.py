"""Chunks in runs are the chunks of a list, whatever one wants to know about them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.store import filled
from torchtitan_lite.checkpoint.format import chunk_runs, found_runs
from torchtitan_lite.checkpoint.format.chunk_runs import ChunkRun, ChunkRuns, FileSizes, chunk_mismatch, files_of_rows
from torchtitan_lite.checkpoint.format.contents import Chunk, Contents, StoredTensor
from torchtitan_lite.checkpoint.format.dtypes import DTYPES
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.errors import CheckpointDamaged
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import Manifest, Table

FLOAT = DTYPES["float32"]
SIZES = st.integers(1, 9)


def cut(size: int, parts: int) -> list[tuple[int, int]]:
    """Return the (offset, size) of each of `parts` shards of a dimension, as torch.chunk cuts it."""
    length = -(-size // parts)
    begins = [min(size, number * length) for number in range(parts)]
    return [(begin, min(size, begin + length) - begin) for begin in begins]


@st.composite
def sharded(draw: st.DrawFn) -> tuple[list[int], list[list[Any]]]:
    """Return a shape, and the chunks of a tensor of it on a mesh: in any order of ranks, mostly at one byte."""
    shape = draw(st.lists(SIZES, min_size=1, max_size=3))
    parts = [draw(st.sampled_from([1, 1, 2, 3, 5, 12])) for _ in shape]
    cells = [*itertools.product(*(cut(size, count) for size, count in zip(shape, parts, strict=True)))]
    cells = [cell for cell in cells if all(size for _, size in cell)]
    step = draw(st.integers(1, 3))
    ranks = [draw(st.integers(0, 5)) + step * number for number in range(len(cells))]
    order = draw(st.sampled_from(["ranks", "reversed", "permuted"]))
    ranks = ranks[::-1] if order == "reversed" else draw(st.permutations(ranks)) if order == "permuted" else ranks
    places = [draw(st.sampled_from([640] * 9 + [704])) for _ in cells]
    index = draw(st.integers(0, 1))
    chunks = [
        [f"__{rank}_{index}.distcp", at, [offset for offset, _ in cell], [size for _, size in cell]]
        for rank, at, cell in zip(ranks, places, cells, strict=True)
    ]
    return shape, chunks


def listed(shape: list[int], chunks: list[list[Any]]) -> StoredTensor:
    return StoredTensor(FLOAT, tuple(shape), [Chunk(f, at, tuple(o), tuple(s)) for f, at, o, s in chunks])


def in_runs(shape: list[int], chunks: list[list[Any]]) -> StoredTensor:
    """Return the tensor with these chunks in runs, through JSON; as a list where that is as short."""
    encoded = found_runs.encode_runs(chunks)
    if encoded is None:
        return listed(shape, chunks)
    assert len(encoded) < len(chunks)
    runs = chunk_runs.decode_runs(json.loads(json.dumps(encoded)), len(shape))
    return StoredTensor(FLOAT, tuple(shape), runs, runs)


@given(sharded())
def test_the_runs_of_a_tensor_are_its_chunks(tensor: tuple[list[int], list[list[Any]]]) -> None:
    expected, found = listed(*tensor), in_runs(*tensor)
    assert sorted(found.chunks) == sorted(expected.chunks)
    assert len(found.chunks) == len(expected.chunks)
    assert [found.chunks[number] for number in range(len(found.chunks))] == [*found.chunks]
    assert found.chunks[-1] == [*found.chunks][-1]
    with pytest.raises(IndexError):
        found.chunks[len(found.chunks)]


@given(sharded(), st.data())
def test_the_chunks_near_a_box_are_those_that_share_an_element_with_it(
    tensor: tuple[list[int], list[list[Any]]], data: st.DataObject
) -> None:
    found = in_runs(*tensor)
    offsets = tuple(data.draw(st.integers(0, size)) for size in found.shape)
    sizes = tuple(data.draw(st.integers(0, size - at)) for size, at in zip(found.shape, offsets, strict=True))

    def shares(chunk: Chunk) -> bool:
        edges = zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
        return all(max(begin, own) < min(begin + size, own + length) for begin, size, own, length in edges)

    near = [*found.near(offsets, sizes)]
    assert sorted(filter(shares, near)) == sorted(filter(shares, found.chunks))
    assert found.runs is None or all(map(shares, near))


@given(sharded(), st.integers(0, 40), st.integers(0, 1))
def test_the_chunks_in_a_file_are_those_that_name_it(
    tensor: tuple[list[int], list[list[Any]]], rank: int, index: int
) -> None:
    found, file = in_runs(*tensor), f"__{rank}_{index}.distcp"
    assert sorted(found.chunks_in(file)) == sorted(chunk for chunk in found.chunks if chunk.file == file)
    assert [*found.chunks_in(f"__{rank}_2.distcp")] == []
    assert [*found.chunks_in("other.bin")] == []
    if found.runs is not None:
        assert files_of_rows({run.row for run in found.runs.runs}) == {chunk.file for chunk in found.chunks}


@given(sharded(), st.data())
def test_runs_fit_together_exactly_where_their_chunks_do(
    tensor: tuple[list[int], list[list[Any]]], data: st.DataObject
) -> None:
    shape, chunks = tensor
    assert chunk_mismatch(in_runs(shape, chunks)) == ""
    damage = data.draw(st.sampled_from(["lost", "twice", "moved", "longer"]))
    number = data.draw(st.integers(0, len(chunks) - 1))
    file, at, offsets, sizes = chunks[number]
    changed = {
        "lost": [],
        "twice": [chunks[number], ["__99_0.distcp", at, offsets, sizes]],
        "moved": [[file, at, [offset + 1 for offset in offsets], sizes]],
        "longer": [[file, at, offsets, [size + 1 for size in sizes]]],
    }[damage]
    wrong = chunks[:number] + changed + chunks[number + 1 :]
    assert bool(chunk_mismatch(in_runs(shape, wrong)) if wrong else "none")
    assert not wrong or chunk_mismatch(in_runs(shape, wrong)) == chunk_mismatch(listed(shape, wrong))


@given(sharded(), st.data())
def test_the_chunks_outside_are_those_in_a_missing_or_too_short_file(
    tensor: tuple[list[int], list[list[Any]]], data: st.DataObject
) -> None:
    found = in_runs(*tensor)
    names = sorted({chunk.file for chunk in found.chunks})
    sizes = {
        name: data.draw(st.sampled_from([10_000] * 5 + [700, 0])) for name in names if data.draw(st.integers(0, 9))
    }

    def is_outside(chunk: Chunk) -> bool:
        return chunk.file not in sizes or (chunk.at or 0) + 4 * chunk.numel > sizes[chunk.file]

    if found.runs is not None:
        outside = [*FileSizes(sizes).outside(found.runs, 4)]
        assert sorted(outside) == sorted(filter(is_outside, found.chunks))


def test_a_sharded_tensor_is_one_run_however_many_ranks_hold_it() -> None:
    chunks = [[f"__{rank}_0.distcp", 640, [4 * rank, 0], [4, 7]] for rank in range(1000)]
    assert found_runs.encode_runs(chunks) == [[1000, [0, 1], 640, 0, [0, 0], [4, 7]]]


def test_tensor_parallelism_over_columns_is_a_run_for_each_part() -> None:
    chunks = [
        [f"__{8 * shard + part}_0.distcp", 0, [2 * shard, 5 * part], [2, 5]] for shard in range(50) for part in range(8)
    ]
    runs = found_runs.encode_runs(chunks)
    assert runs is not None
    assert runs[3] == [50, [3, 8], 0, 0, [0, 15], [2, 5]]
    assert len(runs) == 8


@pytest.mark.parametrize(
    "chunks",
    {
        "few": [[f"__{rank}_0.distcp", 0, [rank], [1]] for rank in range(3)],
        "files of other names": [[f"part-{rank}", 0, [rank], [1]] for rank in range(9)],
        "third files": [[f"__{rank}_2.distcp", 0, [rank], [1]] for rank in range(9)],
        "files of both": [[f"__{rank}_{rank % 2}.distcp", 0, [rank], [1]] for rank in range(9)],
        "in one file": [["__0_0.distcp", 0, [rank], [1]] for rank in range(9)],
        "at different bytes": [[f"__{rank}_0.distcp", 64 * rank, [rank], [1]] for rank in range(9)],
        "of different sizes": [[f"__{n}_0.distcp", 0, [n * (n + 1) // 2], [n + 1]] for n in range(9)],
        "copies of a number": [[f"__{rank}_0.distcp", 0, [], []] for rank in range(9)],
        "empty": [[f"__{rank}_0.distcp", 0, [rank, 0], [1, 0]] for rank in range(9)][:1] * 9,
    }.items(),
    ids=lambda pair: pair[0],
)
def test_a_list_stays_where_runs_are_no_shorter(chunks: tuple[str, list[list[Any]]]) -> None:
    assert found_runs.encode_runs(chunks[1]) is None


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (None, "a list of runs"),
        ([5], "a run of"),
        ([[]], "a run of"),
        ([["5", [0, 1], 0, 0, [0], [1]]], "a run of"),
        ([[True, [0, 1], 0, 0, [0], [1]]], "a run of"),
        ([[5, [0], 0, 0, [0], [1]]], "a run of"),
        ([[5, [0, 1.0], 0, 0, [0], [1]]], "a run of"),
        ([[5, [0, 1], 0, 0, ["0"], [1]]], "a run of"),
        ([[5, [0, 1], 0, 0, [0, 0], [1]]], "number of dimensions"),
        ([[5, [0, 1], 0, 0, [0, 0], [1, 1]]], "number of dimensions"),
        ([[0, [0, 1], 0, 0, [0], [1]]], "negative number, no chunk"),
        ([[5, [0, 0], 0, 0, [0], [1]]], "all its chunks in one file"),
        ([[5, [0, -1], 0, 0, [0], [1]]], "all its chunks in one file"),
        ([[5, [-1, 1], 0, 0, [0], [1]]], "negative number"),
        ([[5, [0, 1], -1, 0, [0], [1]]], "negative number"),
        ([[5, [0, 1], 0, -1, [0], [1]]], "negative number"),
        ([[5, [0, 1], 0, 0, [-1], [1]]], "negative number"),
        ([[5, [0, 1], 0, 0, [0], [-1]]], "negative number"),
        ([[5, [0, 1], 0, 1, [0], [1]]], "one after another"),
        ([[5, [0, 1], 0, 0, [0], [0]]], "one after another"),
    ],
)
def test_what_is_no_run_is_refused(runs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chunk_runs.decode_runs(runs, 1)


def manifest_of(runs: list[Any], shape: list[int], files: int) -> Manifest:
    return filled.manifest_of(
        4,
        world_size=max(files, 1),
        lineage=Lineage("run"),
        files={f"__{rank}_0.distcp": FileRecord(4096, b"") for rank in range(files)},
        tensors=Table({"w": {"dtype": "uint8", "shape": shape, "runs": runs}}),
        structure=Table({"root": {"kind": "dict", "keys": ["w"]}}),
    )


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([[5, [0, 1], 0, 0, [0], [200]]], "a run of 5 chunks, each in another file, but there are 4 files"),
        ([[4, [0, 1 << 40], 0, 0, [0], [250]]], "a run that ends past rank 8388608"),
        ([[10**15, [0, 1], 0, 0, [0], [1]]], "but there are 4 files"),
        ([[4, [0, 1], 0, 0, [0], [200]]], "its chunks have 800 elements where there are 1000"),
        ([[4, [0, 1], 0, 0, [0], [250]]] * 2, "its chunks have 2000 elements where there are 1000"),
        ([[4, [0, 1], 0, 0, [1], [250]]], "a chunk is partly outside of it"),
        ([[2, [0, 1], 0, 0, [0], [250]], [2, [2, 1], 0, 0, [0], [250]]], "its chunks overlap"),
        ([[4, [1, 1], 0, 0, [0], [250]]], "__4_0.distcp is missing; w is in it, says manifest.json"),
        ([[4, [0, 1], 4000, 0, [0], [250]]], "__0_0.distcp has 4096 bytes; w is in bytes 4000 to 4250 of it"),
    ],
)
def test_runs_that_do_not_fit_the_files_or_the_tensor_are_damage(runs: list[Any], message: str) -> None:
    manifest = manifest_of(runs, [1000], 4)
    with pytest.raises(CheckpointDamaged, match=message):
        contents = Contents.of_manifest(manifest, "c")
        contents.check({name: record.size for name, record in manifest.files.items()})


def test_runs_that_name_more_files_than_any_job_has_are_refused_before_each_is_looked_up() -> None:
    runs = [[9000, [first, 2], 0, 0, [9000 * first], [1]] for first in range(1000)]
    with pytest.raises(CheckpointDamaged, match="runs over 9000000 files in all"):
        Contents.of_manifest(manifest_of(runs, [9_000_000], 20_000), "c")


def test_a_run_names_its_keys_in_a_damaged_range() -> None:
    contents = Contents.of_manifest(manifest_of([[4, [0, 1], 64, 0, [0], [250]]], [1000], 4), "c")
    assert contents.keys_in("__2_0.distcp", 0, 65) == ["w"]
    assert contents.keys_in("__2_0.distcp", 0, 64) == []
    assert contents.keys_in("__4_0.distcp", 0, 65) == []
    assert contents.files == {f"__{rank}_0.distcp" for rank in range(4)}


def test_a_box_of_a_run_covers_its_chunks() -> None:
    run = ChunkRun(3, 0, 1, 0, 1, (2, 10), (4, 5))
    assert run.box() == Chunk("", 0, (2, 10), (4, 15))
    assert [chunk.offsets for chunk in ChunkRuns((run,))] == [(2, 10), (2, 15), (2, 20)]
