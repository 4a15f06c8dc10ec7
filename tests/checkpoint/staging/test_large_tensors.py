"""From 4 GiB on, the sizes and places of a tensor do not fit into 32 bits; nothing else changes."""

from __future__ import annotations

import os
import shutil
import struct
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from tests.checkpoint.reading.memory import MIB, peak_above_before, untouched_zeros
from tests.checkpoint.small_run import target
from tests.ranks import Ranks
from torchtitan_lite.checkpoint.format.torch_contents import DTYPES
from torchtitan_lite.checkpoint.format.torch_item import tensor_frame
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint
from torchtitan_lite.checkpoint.saving.savers import SyncSaver
from torchtitan_lite.checkpoint.untrusted.stock_item import locate
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.store.store import CheckpointStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FOUR_GIB = 1 << 32
LARGE = FOUR_GIB + 12_345
MARKS = [0, 1, FOUR_GIB - 4097, FOUR_GIB - 1, FOUR_GIB, FOUR_GIB + 4096, LARGE - 1]
"""Positions of the bytes of the large tensor that are not 0."""
NEEDED_BYTES = 12 << 30
"""Free space on the disk: for the checkpoint twice, and a reserve for other processes."""
WRITE_BYTES = 200 * MIB
"""Limit of the memory that a save takes."""
HEAD = len(tensor_frame(torch.uint8, (LARGE,)).head)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((torch.uint8, (FOUR_GIB + more,)) for more in (-HEAD - 64, -HEAD, -HEAD + 1, -65, -2, -1, 0, 1, 12_345)),
        (torch.float64, (3, 3 << 26)),
        (torch.bfloat16, (1 << 17, 1 << 14)),
        (torch.complex128, (5 << 26, 1)),
        (torch.uint16, (FOUR_GIB // 2 + 1,)),
    ],
    ids=str,
)
def test_a_frame_around_gigabytes_is_read_by_torch_and_by_us(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """All but a few bytes of the file are a hole."""
    frame, path = tensor_frame(dtype, shape), tmp_path / "item"
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    item_bytes = len(frame.head) + num_bytes + len(frame.tail)
    # Both headers have them, though torch reads only the second one.
    in_64_bits = struct.pack("<2sHQQ", b"\x01\x00", 16, num_bytes, num_bytes)
    assert [frame.head.count(in_64_bits), frame.tail.count(in_64_bits)] == [num_bytes >= FOUR_GIB - 1] * 2
    with path.open("wb") as file:
        file.write(frame.head)
        for at in (0, num_bytes // 2, num_bytes - 1):
            file.seek(len(frame.head) + at)
            file.write(b"\x01")
        file.write(frame.tail)
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert (loaded.dtype, loaded.shape, loaded.is_contiguous()) == (dtype, torch.Size(shape), True)
    as_bytes = loaded.view(-1).view(torch.uint8)
    assert [as_bytes[at].item() for at in (0, 1, num_bytes // 2, num_bytes - 2, num_bytes - 1)] == [1, 0, 1, 0, 1]
    with path.open("rb") as file:
        found = locate(partial(_part, file.fileno()), item_bytes, DTYPES)
    assert found is not None
    assert (found.at, found.dtype, found.shape) == (len(frame.head), dtype, shape)


def _part(fd: int, at: int, count: int) -> bytes:
    return os.pread(fd, count, at)


def zeros_and_more(*, marked: bool) -> dict[str, Tensor]:
    """Return a tensor of more than 4 GiB, one before it in the file and two after it."""
    large = untouched_zeros(LARGE)
    after = torch.arange(100_000.0) if marked else torch.zeros(100_000)
    if marked:
        large[MARKS] = torch.arange(1, len(MARKS) + 1, dtype=torch.uint8)
    return {"before": after[:7].clone(), "large": large, "one row": after[::3], "after": after}


def save(rank: int, folder: Path) -> int:
    """Save, and return the peak of the memory that it took."""
    state = {"model": zeros_and_more(marked=True)}
    saver = SyncSaver(Peers(timedelta(seconds=60)))
    pending = peak_above_before(lambda: saver.save(state, target(CheckpointStore(folder), 1)).durable.result())
    return pending


def load_with_ours(rank: int, folder: Path) -> int:
    """Load, and return the peak of the memory that it took on top of the loaded tensors."""
    found = zeros_and_more(marked=False)
    stored = StoredCheckpoint(folder / "step-1", Peers(timedelta(seconds=60)))
    peak = peak_above_before(lambda: stored.read_model(found))
    _check(found)
    return peak - LARGE


def load_with_plain_dcp(rank: int, folder: Path) -> None:
    found = zeros_and_more(marked=False)
    _ignore_one_process()
    dcp_load({"model": found}, storage_reader=FileSystemReader(folder / "step-1"), no_dist=True)
    _check(found)


def _check(found: dict[str, Tensor]) -> None:
    expected = torch.arange(100_000.0)
    assert torch.equal(found["before"], expected[:7])
    assert torch.equal(found["one row"], expected[::3])
    assert torch.equal(found["after"], expected)
    large = found["large"]
    assert large[MARKS].tolist() == [*range(1, len(MARKS) + 1)]
    assert int(large.count_nonzero()) == len(MARKS)


def _ignore_one_process() -> None:
    import warnings

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@pytest.mark.slow
def test_a_tensor_over_four_gibibytes_is_saved_in_little_memory_and_read_by_both(alone: Ranks, tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < NEEDED_BYTES:
        pytest.skip(f"needs {NEEDED_BYTES >> 30} GiB of free disk space")
    try:
        [saving] = alone.run(save, folder=tmp_path)
        [loading] = alone.run(load_with_ours, folder=tmp_path)
        alone.run(load_with_plain_dcp, folder=tmp_path)
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)
    print(f"extra at its peak: save {saving / MIB:.1f} MiB, load {loading / MIB:.1f} MiB")
    assert saving <= WRITE_BYTES
    assert loading <= 64 * MIB
