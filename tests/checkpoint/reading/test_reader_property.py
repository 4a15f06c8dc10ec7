"""Our reader reads what DCP's own reader reads, and finds every changed byte."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.checkpoint.devices.late_link import LateLink
from tests.checkpoint.reading.boxes import Box, grids, inside, partitions, shapes
from tests.checkpoint.reading.stored_boxes import cut, numbers, write
from tests.checkpoint.with_manifest import add_manifest
from tests.examples import examples
from tests.store.filled import flip
from torchtitan_lite.checkpoint.devices.link import CudaLink
from torchtitan_lite.checkpoint.reading import reader, regions
from torchtitan_lite.checkpoint.reading.reader import CheckpointReader
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint
from torchtitan_lite.disk.block_reader import BlockReader
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointDamaged

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)
CASTS = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32, torch.int64: torch.int32}


@contextmanager
def small_parts(num_bytes: int) -> Iterator[None]:
    """Stage in parts of `num_bytes` meanwhile, and treat runs of a tenth of it as long."""
    before = regions.STAGED_BYTES, regions._LONG_RUN_BYTES, reader.BATCH_BYTES
    regions.STAGED_BYTES, regions._LONG_RUN_BYTES, reader.BATCH_BYTES = num_bytes, num_bytes // 10, 3 * num_bytes
    try:
        yield
    finally:
        regions.STAGED_BYTES, regions._LONG_RUN_BYTES, reader.BATCH_BYTES = before


class _Chunks(DefaultLoadPlanner):
    """Saves and loads tensors in boxes, as ranks would, from one process."""

    def __init__(self, whole: dict[str, torch.Tensor], boxes: dict[str, list[Box]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.whole, self.boxes = whole, boxes

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        box = self.boxes[read_item.dest_index.fqn][read_item.dest_index.index]
        target = cut(self.whole[read_item.dest_index.fqn], box)
        return cut(target, (tuple(read_item.dest_offsets), tuple(read_item.lengths)))

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for key, boxes in self.boxes.items():
            described: Any = self.metadata.state_dict_metadata[key]
            chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
            for index, chunk in enumerate(chunks):
                for item in create_read_items_for_chunk_list(key, described, [chunk]):
                    where = MetadataIndex(key, chunk.offsets, index)
                    items.append(type(item)(**{**vars(item), "dest_index": where}))
        return LoadPlan(items)


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of `shape` with any memory layout."""
    order = draw(st.permutations(range(len(shape))))
    if draw(st.booleans()):
        return torch.zeros(shape, dtype=dtype)
    room = torch.zeros([shape[dim] + draw(st.integers(0, 2)) for dim in order], dtype=dtype)
    for dim, size in enumerate(shape[d] for d in order):
        room = room.narrow(dim, room.size(dim) - size, size)
    return room.permute([order.index(dim) for dim in range(len(shape))])


@settings(deadline=None, max_examples=examples(120))
@given(st.data())
def test_any_part_of_any_checkpoint_is_read_as_dcp_reads_it(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
    tensors = {f"t{i}": numbers(shape, dtype, i) for i, dtype in enumerate(dtypes)}
    if data.draw(st.booleans()):
        tensors = {key: tensor.transpose(0, -1).contiguous().transpose(0, -1) for key, tensor in tensors.items()}
    stored = {key: data.draw(partitions(shape) | grids(shape)) for key in tensors}
    wanted = {key: data.draw(st.lists(inside(shape), max_size=3) | grids(shape)) for key in tensors}
    casts = {key: data.draw(st.sampled_from([t.dtype, CASTS.get(t.dtype, t.dtype)])) for key, t in tensors.items()}
    ours = {key: data.draw(views(shape, casts[key])) for key in tensors}
    theirs = {key: torch.zeros(shape, dtype=casts[key]) for key in tensors}
    with tempfile.TemporaryDirectory() as name, small_parts(data.draw(st.sampled_from([20, 100, 1 << 20]))):
        folder = Path(name) / "c"
        write(folder, tensors, stored)
        if all(t.is_contiguous() for t in tensors.values()) and data.draw(st.booleans()):
            add_manifest(folder)
        if data.draw(st.booleans()):
            forget(folder)
        blocks = BlockReader(data.draw(st.integers(1, 3)), data.draw(st.booleans()))
        on_device = data.draw(st.none() | st.sets(st.integers(0, 30)))
        make_link = CudaLink if on_device is None else partial(LateLink, on_device)
        storage = CheckpointReader(folder, data.draw(st.sampled_from(["off", "size", "full"])), blocks, make_link)
        dcp_load({}, storage_reader=storage, planner=_Chunks(ours, wanted), no_dist=True)
        dcp_load({}, storage_reader=FileSystemReader(folder), planner=_Chunks(theirs, wanted), no_dist=True)
    for key in tensors:
        assert torch.equal(ours[key], theirs[key]), key
        for box in wanted[key]:
            assert torch.equal(cut(ours[key], box), cut(tensors[key], box).to(casts[key]))


def forget(folder: Path) -> None:
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint of several blocks, with objects that are in its files only."""
    folder = tmp_path_factory.mktemp("saved") / "c"
    tensors = {f"w{i}": numbers((300, 500), torch.float32, i) for i in range(4)}
    dcp_save({"model": tensors, "s": {"text": "x" * 3_000_000, "n": 1}}, checkpoint_id=folder, no_dist=True)
    add_manifest(folder)
    return folder


def load_everything(folder: Path) -> dict[str, torch.Tensor]:
    """Verify the rest of the files, and return the model."""
    checkpoint = StoredCheckpoint(folder, Peers(timedelta(seconds=60)))
    checkpoint.verify_rest()
    model = {f"w{i}": torch.zeros(300, 500) for i in range(4)}
    checkpoint.read_model(model)
    return model


@pytest.mark.promise(
    "Any change of any file of a checkpoint is found, and the report names the file and the tensors in it.",
    section="loaded",
)
@settings(deadline=None, max_examples=examples(60))
@example(1 - 1e-9, "manifest.json")  # its last byte, which is read before the others
@given(st.floats(0, 1, exclude_max=True), st.sampled_from(["__0_0.distcp", ".metadata", "manifest.json"]))
def test_a_changed_byte_is_found_wherever_it_is(saved: Path, where: float, name: str) -> None:
    path = saved / name
    at = int(where * path.stat().st_size)
    flip(path, at)
    try:
        with pytest.raises(CheckpointDamaged, match=rf"{name} is damaged|damaged: {name}: |bytes .* of {name}"):
            load_everything(saved)
    finally:
        flip(path, at)


def test_an_undamaged_checkpoint_is_read(saved: Path) -> None:
    model = load_everything(saved)
    assert [key for key in model if not torch.equal(model[key], numbers((300, 500), torch.float32, int(key[1:])))] == []


def test_ranks_share_the_blocks_without_tensors(saved: Path) -> None:
    """One rank verifies each file, and together they verify all files."""
    for name, at in ("__0_0.distcp", 1_500_000), (".metadata", 10):
        flip(saved / name, at)
        found = [finding(saved, number, 3) for number in range(3)]
        flip(saved / name, at)
        assert sum(name in each for each in found) == 1
        assert found.count("") == 2


def finding(folder: Path, number: int, count: int) -> str:
    try:
        CheckpointReader(folder).verify_rest(number, count)
    except CheckpointDamaged as error:
        return error.finding
    return ""
