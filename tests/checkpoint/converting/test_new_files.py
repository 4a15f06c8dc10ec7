"""Every format holds the elements of any stored tensors, bit for bit, as the format's own library reads them."""

from __future__ import annotations

import math
import tempfile
import threading
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from tests.checkpoint.converting.sources import by_columns, sharded_weights
from tests.checkpoint.reading.boxes import partitions, shapes
from tests.checkpoint.reading.stored_boxes import numbers, write
from tests.checkpoint.reading.tensor_layouts import bits, random_bits, zeros
from tests.checkpoint.with_manifest import add_manifest
from tests.examples import examples
from tests.store.filled import flip
from torchtitan_lite.checkpoint.format.dtypes import dtype_name
from torchtitan_lite.checkpoint.format.torch_contents import DTYPES
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.converting import safetensors_files
from torchtitan_lite.converting.dcp_folder import NewState, cut_into_files, write_checkpoint
from torchtitan_lite.converting.streamed_file import NewTensor, cast_between, read_back, write_new
from torchtitan_lite.converting.torch_file import write_state
from torchtitan_lite.errors import CheckpointDamaged, ConfigError, TorchtitanLiteError
from torchtitan_lite.examining.tensor_stream import TensorStream

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
]


def stream_of(path: Path) -> TensorStream:
    folder = CheckpointFolder(path)
    return TensorStream(path, folder.contents, folder.records)


def no_progress(num_bytes: int) -> None:
    pass


def as_they_are(tensors: dict[str, torch.Tensor]) -> dict[str, NewTensor]:
    return {key: NewTensor(dtype_name(t.dtype), tuple(t.shape), key) for key, t in tensors.items()}


def in_dcp(tensors: dict[str, torch.Tensor]) -> NewState:
    return NewState(as_they_are(tensors), {}, {key: (key,) for key in tensors})


def loaded_by_dcp(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state = {key: zeros(tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    dcp_load(state, checkpoint_id=folder, no_dist=True)
    return state


def different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    pairs = ((key, found[key], tensor) for key, tensor in expected.items())
    return [k for k, a, b in pairs if (a.dtype, a.shape, bits(a)) != (b.dtype, b.shape, bits(b))]


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_all_formats_hold_what_any_chunks_hold(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_dims=3))
    dtypes = data.draw(st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]), min_size=1))
    tensors = {f"t{i}": numbers(shape, dtype, i) for i, dtype in enumerate(dtypes)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "c", tensors, {key: data.draw(partitions(shape)) for key in tensors})
        add_manifest(folder / "c")
        stream = stream_of(folder / "c")
        safetensors_files.write_file(folder / "s", as_they_are(tensors), stream, no_progress)
        assert different(safetensors.torch.load_file(folder / "s"), tensors) == []
        write_state(folder / "t", as_they_are(tensors), stream, no_progress)
        assert different(torch.load(folder / "t", weights_only=True), tensors) == []
        (folder / "d").mkdir()
        most = sum(tensor.numel() > 0 for tensor in tensors.values())
        count = data.draw(st.integers(1, max(most, 1)))
        write_checkpoint(folder / "d", in_dcp(tensors), count, stream, no_progress)
        assert different(loaded_by_dcp(folder / "d", tensors), tensors) == []
        assert len([*(folder / "d").glob("*.distcp")]) == count


@pytest.mark.parametrize("format", ["safetensors", "torch", "dcp"])
def test_every_dtype_that_the_format_has(format: str, tmp_path: Path) -> None:
    names = safetensors_files.DTYPES if format == "safetensors" else DTYPES
    tensors = {name: random_bits(DTYPES[name], (3, 5), seed) for seed, name in enumerate(names)}
    write(tmp_path / "c", tensors, {key: by_columns(tensor, 2) for key, tensor in tensors.items()})
    stream = stream_of(tmp_path / "c")
    if format == "safetensors":
        safetensors_files.write_file(tmp_path / "s", as_they_are(tensors), stream, no_progress)
        assert different(safetensors.torch.load_file(tmp_path / "s"), tensors) == []
    elif format == "torch":
        write_state(tmp_path / "t", as_they_are(tensors), stream, no_progress)
        assert different(torch.load(tmp_path / "t", weights_only=True, mmap=True), tensors) == []
    else:
        (tmp_path / "d").mkdir()
        write_checkpoint(tmp_path / "d", in_dcp(tensors), 2, stream, no_progress)
        assert different(loaded_by_dcp(tmp_path / "d", tensors), tensors) == []


def test_a_cast_rounds_as_torch_does(tmp_path: Path) -> None:
    tensor = torch.randn(1000, 30)
    tensor[0, :3] = torch.tensor([math.inf, math.nan, 1e-40])
    write(tmp_path / "c", {"t": tensor}, {"t": by_columns(tensor, 3)})
    for name in ("bfloat16", "float16", "float64"):
        dtype = DTYPES[name]
        cast = NewTensor(name, (1000, 30), "t", cast_between("float32", name))
        write_state(tmp_path / name, {"t": cast}, stream_of(tmp_path / "c"), no_progress)
        assert bits(torch.load(tmp_path / name)["t"]) == bits(tensor.to(dtype))


def test_elements_begin_at_multiples_of_64_bytes_and_entries_are_not_compressed(tmp_path: Path) -> None:
    tensors = {f"t{i}": numbers((i, 3), torch.uint8, i) for i in range(1, 9)}
    write(tmp_path / "c", tensors, {key: by_columns(tensor, 1) for key, tensor in tensors.items()})
    write_state(tmp_path / "t", as_they_are(tensors), stream_of(tmp_path / "c"), no_progress)
    data = (tmp_path / "t").read_bytes()
    with zipfile.ZipFile(tmp_path / "t") as archive:
        entries = archive.infolist()
    assert {entry.compress_type for entry in entries} == {zipfile.ZIP_STORED}
    for entry in entries:
        if "data/" in entry.filename:
            header = data[entry.header_offset : entry.header_offset + 30]
            lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            assert (entry.header_offset + 30 + lengths) % 64 == 0


@example([((), torch.float32), ((), torch.bfloat16), ((), torch.float32), ((), torch.int64)], 4)
@given(st.lists(st.tuples(shapes(), st.sampled_from([torch.float32, torch.uint8])), max_size=6), st.integers(1, 9))
def test_files_cover_every_tensor_once_in_equal_parts(
    specs: list[tuple[tuple[int, ...], torch.dtype]], num_files: int
) -> None:
    tensors = {f"t{i}": NewTensor(dtype_name(dtype), shape, f"t{i}") for i, (shape, dtype) in enumerate(specs)}
    try:
        files = cut_into_files(tensors, num_files)
    except ConfigError as refusal:
        num_rows = sum(next((n for n in t.shape if n > 1), 1) for t in tensors.values() if t.num_bytes)
        assert num_rows < num_files
        assert f"ask for at most {max(num_rows, 1)}" in str(refusal)
        return
    assert len(files) == num_files
    covered = {key: torch.zeros(math.prod(tensor.shape), dtype=torch.int8) for key, tensor in tensors.items()}
    for file in files:
        assert num_files == 1 or any(piece.num_bytes for piece in file.values())
        for key, piece in file.items():
            assert piece.num_bytes == math.prod(piece.cut.sizes) * DTYPES[piece.dtype].itemsize
            covered[key][piece.cut.begin : piece.cut.begin + piece.cut.numel] += 1
    assert all(bool((marks == 1).all()) for marks in covered.values())
    rows = [t.num_bytes // next((n for n in t.shape if n > 1), 1) for t in tensors.values()]
    sizes = [sum(piece.num_bytes for piece in file.values()) for file in files]
    fair = sum(sizes) / num_files
    assert max(sizes, default=0) <= fair + 2 * num_files * max(rows, default=0)


def test_a_large_tensor_is_spread_evenly_over_files() -> None:
    tensors = {"a": NewTensor("float32", (1, 4096, 64), "a"), "b": NewTensor("float32", (100,), "b")}
    sizes = [sum(piece.num_bytes for piece in file.values()) for file in cut_into_files(tensors, 7)]
    assert max(sizes) - min(sizes) <= 2 * 256


def test_shards_are_filled_in_order_and_a_larger_tensor_has_one_of_its_own() -> None:
    sizes = {"a": 40, "b": 30, "c": 200, "d": 50, "e": 50}
    tensors = {key: NewTensor("uint8", (size,), key) for key, size in sizes.items()}
    shards = safetensors_files.sharded(tensors, 100)
    assert {name: [*shard] for name, shard in shards.items()} == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c"],
        "model-00003-of-00003.safetensors": ["d", "e"],
    }


def test_a_damaged_block_ends_the_write_with_its_place_and_no_thread_remains(tmp_path: Path) -> None:
    folder, tensors = sharded_weights(tmp_path / "c")
    flip(next(folder.glob("*.distcp")), 700_000)
    before = threading.active_count()
    with pytest.raises(CheckpointDamaged, match=r"in it: .*tok\.weight"):
        safetensors_files.write_file(tmp_path / "s", as_they_are(tensors), stream_of(folder), no_progress)
    assert threading.active_count() == before


def test_reading_back_finds_what_the_disk_changed(tmp_path: Path) -> None:
    folder, tensors = sharded_weights(tmp_path / "c")
    stream = stream_of(folder)
    record = write_new(tmp_path / "f", [b"head", as_they_are(tensors)["tok.weight"]], stream, no_progress)
    read_back(tmp_path / "f", record, stream.reader, no_progress)
    assert (tmp_path / "f").read_bytes() == b"head" + bits(tensors["tok.weight"])
    flip(tmp_path / "f", 1000)
    with pytest.raises(TorchtitanLiteError, match="f was written, but the disk has other bytes"):
        read_back(tmp_path / "f", record, stream.reader, no_progress)
