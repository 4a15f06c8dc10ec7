"""A stream yields elements in order from any chunks, reads each block once, and finds every changed byte."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.checkpoint.reading.boxes import grids, partitions, shapes
from tests.checkpoint.reading.stored_boxes import numbers, write
from tests.checkpoint.reading.tensor_layouts import bits, every_tensor
from tests.checkpoint.with_manifest import add_manifest
from tests.examples import examples
from tests.store.filled import flip
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnreadable
from torchtitan_lite.examining import tensor_stream
from torchtitan_lite.examining.tensor_stream import TensorStream, cuts

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.complex64, torch.complex128)


def stream_of(path: Path) -> TensorStream:
    folder = CheckpointFolder(path)
    return TensorStream(path, folder.contents, folder.records)


def joined(stream: TensorStream, key: str, most_elements: int | None = None) -> bytes:
    """Return all elements of the tensor, after checking that slices are not too large."""
    itemsize = stream.contents.tensors[key].dtype.itemsize
    data = bytearray()
    for part in stream.slices(key, most_elements):
        assert most_elements is None or 0 < len(part) <= most_elements * itemsize
        data += part
    return bytes(data)


@contextmanager
def small_parts(num_bytes: int) -> Iterator[None]:
    """Read elements that are not in a row in parts of `num_bytes` meanwhile, and keep two blocks."""
    before = tensor_stream._SPAN_BYTES, tensor_stream._LONG_STEP_BYTES, tensor_stream.KEPT_BLOCKS
    tensor_stream._SPAN_BYTES, tensor_stream._LONG_STEP_BYTES, tensor_stream.KEPT_BLOCKS = num_bytes, num_bytes, 2
    try:
        yield
    finally:
        tensor_stream._SPAN_BYTES, tensor_stream._LONG_STEP_BYTES, tensor_stream.KEPT_BLOCKS = before


def bytes_read() -> int:
    """Return how many bytes this process has read by system calls."""
    return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])


@settings(deadline=None, max_examples=examples(150))
@given(st.data())
def test_any_tensor_is_streamed_in_order_from_any_chunks(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
    tensors = {f"t{i}": numbers(shape, dtype, i) for i, dtype in enumerate(dtypes)}
    if data.draw(st.booleans()):
        tensors = {key: tensor.transpose(0, -1).contiguous().transpose(0, -1) for key, tensor in tensors.items()}
    stored = {key: data.draw(partitions(shape) | grids(shape)) for key in tensors}
    with tempfile.TemporaryDirectory() as name, small_parts(data.draw(st.sampled_from([8, 50, 1 << 20]))):
        folder = Path(name) / "c"
        write(folder, tensors, stored)
        if all(tensor.is_contiguous() for tensor in tensors.values()) and data.draw(st.booleans()):
            add_manifest(folder)
        stream = stream_of(folder)
        for key, tensor in tensors.items():
            assert joined(stream, key, data.draw(st.none() | st.integers(1, 20))) == bits(tensor)


@given(shapes(), st.integers(1, 50))
def test_cuts_make_up_the_tensor_and_are_as_large_as_allowed(shape: tuple[int, ...], most: int) -> None:
    numel = torch.Size(shape).numel()
    at = 0
    for cut in cuts(shape, most):
        index = torch.arange(numel).reshape(shape)
        for dim, (offset, size) in enumerate(zip(cut.offsets, cut.sizes, strict=True)):
            index = index.narrow(dim, offset, size)
        assert index.flatten().tolist() == [*range(cut.begin, cut.begin + cut.numel)]
        assert cut.begin == at
        assert cut.numel <= most
        at += cut.numel
    assert at == numel


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_and_memory_layout_is_streamed(tmp_path: Path) -> None:
    tensors = every_tensor()
    dcp_save(dict(tensors), checkpoint_id=tmp_path / "c", no_dist=True)
    stream = stream_of(tmp_path / "c")
    assert [key for key, tensor in tensors.items() if joined(stream, key) != bits(tensor)] == []
    assert [key for key, tensor in tensors.items() if joined(stream, key, 999) != bits(tensor)] == []


def columns(shape: tuple[int, int], count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the boxes of a tensor that `count` ranks hold by columns."""
    rows, width = shape[0], shape[1] // count
    return [((0, rank * width), (rows, width)) for rank in range(count)]


def test_each_block_is_read_once_however_the_tensor_is_sharded(tmp_path: Path) -> None:
    tensors = {f"t{i}": numbers((1024, 1024), torch.float32, i) for i in range(3)}
    folder = tmp_path / "c"
    write(folder, tensors, {key: columns((1024, 1024), 16) for key in tensors})
    add_manifest(folder)
    stream = stream_of(folder)
    size = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    before = bytes_read()
    for key, tensor in tensors.items():
        assert joined(stream, key, 4096) == bits(tensor)
    assert size <= bytes_read() - before < 1.1 * size


def test_a_changed_byte_of_a_tensor_is_found_with_its_file_and_names(tmp_path: Path) -> None:
    tensors = {f"t{i}": numbers((300, 500), torch.float32, i) for i in range(4)}
    folder = tmp_path / "c"
    write(folder, tensors, {key: columns((300, 500), 5) for key in tensors})
    manifest = add_manifest(folder)
    file, at, *_ = manifest.tensors["t2"]["chunks"][3]
    flip(folder / file, at + 1000)
    stream = stream_of(folder)
    with pytest.raises(CheckpointDamaged, match=rf"bytes \d+ to \d+ of {file}: .* \(in it: .*t2"):
        joined(stream, "t2", 1000)


def test_a_file_that_is_removed_meanwhile_is_not_called_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    write(folder, {"t": numbers((64, 64), torch.float32, 0)}, {"t": columns((64, 64), 4)})
    stream = stream_of(folder)
    next(stream.slices("t", 8))
    for path in folder.glob("*.distcp"):
        path.unlink()
    with pytest.raises(CheckpointUnreadable, match="ENOENT"):
        joined(stream, "t", 8)
