"""What is read for a device gets there, verified, through little memory, and nothing is freed or seen too early."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.checkpoint.devices.late_link import LateLink
from tests.checkpoint.reading.mixed_state import empty, saved
from tests.checkpoint.small_run import same
from tests.checkpoint.with_manifest import add_manifest
from tests.disk.pieces import forget
from tests.store.filled import flip
from torchtitan_lite.checkpoint.devices import buffer_ring as device_ring
from torchtitan_lite.checkpoint.devices.buffer_ring import SLOT_BYTES
from torchtitan_lite.checkpoint.reading import reader, regions
from torchtitan_lite.checkpoint.reading.reader import CheckpointReader
from torchtitan_lite.checkpoint.reading.regions import RankReads, Region
from torchtitan_lite.disk import block_reader
from torchtitan_lite.disk.block_reader import BlockReader
from torchtitan_lite.disk.digest import BLOCK_BYTES
from torchtitan_lite.disk.read_requests import REQUEST_BYTES, ReadsBlocks
from torchtitan_lite.memory.images.mapped_reader import MappedReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_load_takes_at_most_64_mib() -> None:
    buffers = block_reader.THREADS * (REQUEST_BYTES + BLOCK_BYTES)
    assert device_ring.NUM_SLOTS * SLOT_BYTES + buffers + reader.BATCH_BYTES <= 64 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of several requests, with a manifest."""
    dcp_save(saved(), checkpoint_id=tmp_path / "c", no_dist=True)
    add_manifest(tmp_path / "c")
    return tmp_path / "c"


@contextmanager
def reading(source: str, folder: Path, threads: int = block_reader.THREADS) -> Iterator[ReadsBlocks]:
    """Yield what reads the file of `folder` from the disk, from the page cache, or from memory."""
    [file] = folder.glob("*.distcp")
    if source == "disk":
        forget(file)
    if source != "memory":
        yield BlockReader(direct=source == "disk", threads=threads)
        return
    fd = os.memfd_create("image")
    os.write(fd, file.read_bytes())
    yield MappedReader({file.name: fd})
    os.close(fd)


SOURCES = ["disk", "cache", "memory"]


def test_parts_that_are_converted_on_the_device_go_there_in_batches(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "STAGED_BYTES", 1 << 20)
    monkeypatch.setattr(reader, "BATCH_BYTES", 2 << 20)
    link, state = LateLink(), {"b": empty()["b"]}
    dcp_load(state, storage_reader=CheckpointReader(folder, make_link=lambda: link), no_dist=True)
    assert same(state, {"b": saved()["b"]})
    assert link.num_calls >= 4


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("eager", [range(0), range(0, 1000, 3), range(1000)], ids=["late", "some at once", "at once"])
def test_a_state_of_any_layout_is_loaded(folder: Path, eager: range, source: str) -> None:
    link, state = LateLink(eager), empty()
    with reading(source, folder) as blocks:
        reads = CheckpointReader(folder, blocks=blocks, make_link=lambda: link)
        dcp_load(state, storage_reader=reads, no_dist=True)
    assert same(state | {"d": state["d"].long()}, saved())
    assert link.locked == 0
    assert 0 < link.most_locked <= 64 << 20


@pytest.mark.parametrize("failing", range(0, 12, 2))
def test_a_copy_that_fails_is_raised_once_all_others_have_ended(folder: Path, failing: int) -> None:
    link = LateLink(failing=failing)
    with pytest.raises(CheckpointException, match="the device is lost"):
        dcp_load(empty(), storage_reader=CheckpointReader(folder, make_link=lambda: link), no_dist=True)
    assert link.locked == 0


@pytest.mark.parametrize("threads", [1, block_reader.THREADS])
@pytest.mark.parametrize("source", SOURCES)
def test_a_damaged_block_never_travels(folder: Path, source: str, threads: int) -> None:
    [file] = folder.glob("*.distcp")
    data = file.read_bytes()
    number = len(data) // BLOCK_BYTES - 1  # The last whole one: those before it travel, if one thread reads.
    flip(file, number * BLOCK_BYTES + 12345)
    link = LateLink()
    refused = pytest.raises(CheckpointException, match=f"bytes {number * BLOCK_BYTES} to {(number + 1) * BLOCK_BYTES}")
    with reading(source, folder, threads) as blocks, refused:
        reads = CheckpointReader(folder, blocks=blocks, make_link=lambda: link)
        dcp_load(empty(), storage_reader=reads, no_dist=True)
    assert link.begun or threads > 1, "of several threads, one may meet the damage first"
    assert all(part in data for part in link.begun)
    assert link.locked == 0


class Unreached(LateLink):
    """Leads to no tensor."""

    def reaches(self, tensor: torch.Tensor) -> bool:
        return False


def test_a_load_into_the_memory_of_the_host_takes_no_ring(folder: Path) -> None:
    link, state = Unreached(), empty()
    dcp_load(state, storage_reader=CheckpointReader(folder, make_link=lambda: link), no_dist=True)
    assert same(state | {"d": state["d"].long()}, saved())
    assert (link.num_calls, link.most_locked) == (0, 0)


def test_a_shard_of_columns_travels_in_few_copies(folder: Path) -> None:
    link, wanted = LateLink(), torch.zeros(3000, 100)
    reads = CheckpointReader(folder, make_link=lambda: link)
    [chunk] = reads._folder.contents.tensors["a"].chunks
    reads.read(RankReads([Region("a", chunk, (0, 300), wanted)]))
    assert torch.equal(wanted, saved()["a"][:, 300:400])
    assert len(link.begun) <= 2 * 3000 * 700 * 4 // SLOT_BYTES
