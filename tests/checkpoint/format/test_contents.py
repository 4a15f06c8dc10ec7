"""Which tables of a checkpoint's contents are accepted, and that they match DCP's own metadata."""

from __future__ import annotations

import collections
import enum
import io
import pickle
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardedProperties
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.checkpoint.format.pickled import metadata_bytes
from tests.checkpoint.reading.boxes import Box, grids, partitions, shapes
from tests.checkpoint.with_manifest import add_manifest
from torchtitan_lite.checkpoint.format import dtypes
from torchtitan_lite.checkpoint.format.contents import Chunk, Contents, StoredTensor
from torchtitan_lite.checkpoint.format.torch_contents import DTYPES, to_metadata
from torchtitan_lite.checkpoint.untrusted.safe_metadata import read_metadata
from torchtitan_lite.errors import CheckpointDamaged

FILE = "__0_0.distcp"


def is_taken(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    chunks = [Chunk(FILE, 0, offsets, sizes) for offsets, sizes in boxes]
    contents = Contents("c", {"w": StoredTensor(torch.float32, shape, chunks)}, {})
    try:
        contents.check({FILE: 1 << 20})
    except CheckpointDamaged:
        return False
    return True


def is_covered_once(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Count how many boxes each element is in."""
    counts: collections.Counter[tuple[int, ...]] = collections.Counter()
    for offsets, sizes in boxes:
        counts.update(product(*(range(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))))
    return counts == collections.Counter(product(*map(range, shape)))


@given(st.data())
def test_boxes_that_cover_a_tensor_once_are_accepted(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    assert is_taken(shape, data.draw(partitions(shape) | grids(shape)))


@given(st.data())
def test_boxes_are_accepted_if_and_only_if_each_element_is_in_exactly_one(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_dims=3, max_size=4))
    boxes = data.draw(partitions(shape) | grids(shape))
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes[at]
        moved = tuple(max(0, offset + data.draw(st.integers(-1, 1))) for offset in offsets)
        resized = tuple(max(0, size + data.draw(st.integers(-1, 1))) for size in sizes)
        change = data.draw(st.sampled_from(["drop", "double", "move", "resize", "copy"]))
        if change == "drop" and len(boxes) > 1:
            boxes = [box for i, box in enumerate(boxes) if i != at]
        elif change == "double":
            boxes = [*boxes, boxes[at]]
        elif change == "move":
            boxes = [(moved, sizes) if i == at else box for i, box in enumerate(boxes)]
        elif change == "resize":
            boxes = [(offsets, resized) if i == at else box for i, box in enumerate(boxes)]
        else:
            boxes = [*boxes[1:], boxes[at]]
    assert is_taken(shape, boxes) == is_covered_once(shape, boxes)


@pytest.mark.parametrize("count", [10, 4096])
def test_thousands_of_boxes_are_checked(count: int) -> None:
    rows: list[Box] = [((i, 0), (1, 3)) for i in range(count)]
    assert is_taken((count, 3), rows)
    assert is_taken((2 * count, 3), _bricks(count))
    assert not is_taken((2 * count, 3), [*_bricks(count)[:-2], *_bricks(1)])
    assert not is_taken((count, 3), [*rows[:-1], rows[0]])


def _bricks(count: int) -> list[Box]:
    """Return rows of two boxes each, whose border alternates like in a brick wall."""
    return [box for i in range(count) for box in (((2 * i, 0), (2, 1 + i % 2)), ((2 * i, 1 + i % 2), (2, 2 - i % 2)))]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_every_dtype_has_elements_of_whole_bytes() -> None:
    assert {"bool", "bfloat16", "float32", "float64", "int64", "complex64"} <= set(DTYPES)
    for name, dtype in DTYPES.items():
        assert torch.empty(3, dtype=dtype).nbytes == 3 * dtype.itemsize == 3 * dtypes.DTYPES[name].itemsize
        assert str(dtype) == f"torch.{dtypes.DTYPES[name]}"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_contents_from_dcps_metadata_and_from_our_manifest_convert_to_dcps_metadata(tmp_path: Path) -> None:
    state = {"model": {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.tensor(1)}, "x": [1, {"y": (2,)}]}
    dcp_save(state, checkpoint_id=tmp_path, no_dist=True)
    # Without the strides that torch 2.15 adds.
    expected = pickle.loads(metadata_bytes(FileSystemReader(tmp_path).read_metadata()))
    of_dcp, ours = read_metadata(tmp_path, DTYPES), Contents.of_manifest(add_manifest(tmp_path), "c", DTYPES)
    assert to_metadata(of_dcp).storage_data == expected.storage_data
    for contents in of_dcp, ours:
        metadata = to_metadata(contents)
        assert metadata.state_dict_metadata == expected.state_dict_metadata
        assert metadata.planner_data == expected.planner_data
        assert set(contents) == set(expected.state_dict_metadata)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_metadata_as_older_versions_of_torch_wrote_it_is_understood(tmp_path: Path) -> None:
    """Up to 2.2 with the properties of sharded tensors; in an OrderedDict; without planner data."""
    dcp_save({"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": 1}, checkpoint_id=tmp_path, no_dist=True)
    expected = read_metadata(tmp_path)
    metadata: Any = FileSystemReader(tmp_path).read_metadata()
    metadata.state_dict_metadata["a"].properties = ShardedProperties(dtype=torch.bfloat16)
    metadata.state_dict_metadata = collections.OrderedDict(metadata.state_dict_metadata)
    metadata.planner_data = None
    for protocol in 2, 4, 5:
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
        found = read_metadata(tmp_path)
        assert (found.tensors, found.objects, found.paths) == (expected.tensors, expected.objects, {})


class OfPython3_11_0(pickle.Pickler):
    """Writes members of enums as Python 3.11.0 to 3.11.3 do: as a `getattr` of their class."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_metadata_as_older_versions_of_python_wrote_it_is_understood(tmp_path: Path) -> None:
    dcp_save({"a": torch.ones(2, 3), "b": 1}, checkpoint_id=tmp_path, no_dist=True)
    expected = read_metadata(tmp_path)
    buffer = io.BytesIO()
    OfPython3_11_0(buffer).dump(FileSystemReader(tmp_path).read_metadata())
    assert b"getattr" in buffer.getvalue()
    (tmp_path / ".metadata").write_bytes(buffer.getvalue())
    assert read_metadata(tmp_path) == expected


def test_boxes_that_only_fill_the_right_volume_are_refused() -> None:
    """A gap of the size of an overlap, in two and in three dimensions, among boxes that make no grid."""
    wheel: list[Box] = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert is_taken((3, 3), wheel)
    assert not is_taken((3, 3), [*wheel[:-1], ((0, 1), (1, 1))])
    layers: list[Box] = [((z, *at), (1, *size)) for z in range(2) for at, size in wheel]
    assert is_taken((2, 3, 3), layers)
    assert not is_taken((2, 3, 3), [*layers[:-1], ((0, 1, 1), (1, 1, 1))])


def test_boxes_cut_along_very_many_dimensions_are_refused_at_once() -> None:
    """Their corners would fill any memory."""
    shape = (2,) * 40
    halves: list[Box] = [((i // 2,) * 40, (1,) * 40) for i in range(4)]
    slabs: list[Box] = [((0,) * i + (1,) + (0,) * (39 - i), (1,) * i + (1,) + (2,) * (39 - i)) for i in range(40)]
    assert not is_taken(shape, halves)
    assert not is_taken(shape, [*slabs, ((0,) * 40, (1,) * 40)])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_contents_without_torch_are_the_same_but_for_the_dtypes(tmp_path: Path) -> None:
    dcp_save({"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.tensor(1)}, checkpoint_id=tmp_path, no_dist=True)
    manifest = add_manifest(tmp_path)
    for plain, of_torch in (
        (read_metadata(tmp_path), read_metadata(tmp_path, DTYPES)),
        (Contents.of_manifest(manifest, "c"), Contents.of_manifest(manifest, "c", DTYPES)),
    ):
        assert {key: str(tensor.dtype) for key, tensor in plain.tensors.items()} == {"a": "bfloat16", "b": "int64"}
        for key, tensor in plain.tensors.items():
            assert of_torch.tensors[key] == tensor._replace(dtype=DTYPES[tensor.dtype.name])
            assert of_torch.tensors[key].nbytes == tensor.nbytes
