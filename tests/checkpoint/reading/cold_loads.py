"""Loads of a cold checkpoint by ranks that read the same bytes."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchtitan_lite import faults
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.checkpoint.reading import shared_reads
from torchtitan_lite.checkpoint.reading.folder import Verify
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnreadable

ROWS, COLUMNS = 40, 1 << 20
NUM_BYTES = 4 * ROWS * COLUMNS
assert NUM_BYTES // 2 > shared_reads.SHARED_BYTES
TIMEOUT = timedelta(seconds=60)


def bytes_read() -> int:
    """Return how many bytes this process has had the disk read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def weight() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


def empty(layout: str) -> torch.Tensor:
    if layout == "ddp":
        return torch.zeros(ROWS, COLUMNS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return DTensor.from_local(torch.zeros(ROWS // 2, COLUMNS), mesh, [Replicate(), Shard(0)], run_check=False)


def own_part(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def load(
    rank: int,
    step: Path,
    layout: str,
    fault: str = "",
    ranks_of_host: int = 4,
    tried: int | None = None,
    timeout: timedelta = TIMEOUT,
    verify: Verify = "full",
) -> tuple[int, str, float]:
    """Return how many bytes a load had the disk read, its error, and how long it took.

    `ranks_of_host` ranks are of one host; after `tried` bytes of reads over hosts it is decided whether to continue.
    """
    shared_reads.host_id = lambda: f"host {rank // ranks_of_host}"
    shared_reads.TRIED_BYTES = tried or shared_reads.TRIED_BYTES
    target, peers = empty(layout), Peers(timeout)
    stored = StoredCheckpoint(step, peers, verify=verify)
    stored.report({"weight": target}, {})
    if fault and rank == 1:
        faults.install(fault, rank=rank)
    peers.raise_together(None)
    before, began, error = bytes_read(), time.monotonic(), ""
    try:
        stored.read_model({"weight": target})
    except (CheckpointUnreadable, CheckpointDamaged) as found:
        error = str(found)
    finally:
        faults.install("", rank=rank)
    if not error:
        expected = weight()
        if layout == "hsdp":
            expected = expected.chunk(2)[rank % 2]
        assert torch.equal(own_part(target), expected)
    return bytes_read() - before, error, time.monotonic() - began


def cold_step(folder: Path) -> Path:
    """Return a checkpoint in `folder` of which nothing is in the page cache; skip the test where that is impossible."""
    if not Path("/proc/self/io").exists():
        pytest.skip("the system does not say what a process reads")
    model = torch.nn.ParameterDict({"weight": torch.nn.Parameter(weight())})
    with CheckpointManager.for_loop(model=model, folder=str(folder)) as manager:
        manager.load()
        manager.save(1, now=True)
    step = folder / "step-1"
    for path in step.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    before = bytes_read()
    direct = os.open(step / "__0_0.distcp", os.O_RDONLY)
    os.pread(direct, 1 << 16, 0)
    os.posix_fadvise(direct, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(direct)
    if bytes_read() == before:
        pytest.skip("temporary files are in memory here, so the disk is never read")
    return step
