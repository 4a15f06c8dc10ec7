"""Measure `verify` against a raw direct read of the same files, in one interleaved run.

    python scripts/bench_verify.py FOLDER [--gib 3] [--rounds 5]

Writes a checkpoint of two files into FOLDER, which must take direct I/O, with the digests of a manifest and, once more,
as plain DCP has it, with a CRC-32 in each item. Every round drops the files from the page cache, then reads them once
raw (as many threads and as large requests as `verify` has, into memory that is already touched) and verifies them, in
random order. Prints the speed of each and the median ratio. Starting Python is not included.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from torchtitan_lite.disk.block_reader import THREADS
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.read_requests import REQUEST_BYTES, request_memory
from torchtitan_lite.disk.threads import in_threads
from torchtitan_lite.examining.verification import look_at, read_through
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import CheckpointKind, Manifest, Table

TENSORS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    base = options.folder / "bench-verify"
    try:
        plain = make(base / "plain", int(options.gib * (1 << 30)))
        ours = base / "step-1"
        shutil.copytree(plain, ours, copy_function=os.link)
        add_manifest(ours)
        buffers = [request_memory(REQUEST_BYTES) for _ in range(THREADS)]
        for buffer in buffers:
            buffer[:] = bytes(len(buffer))
        ways: dict[str, Callable[[], None]] = {
            "raw": lambda: read_raw(plain, buffers),
            "digests": lambda: verify(ours),
            "checksums": lambda: verify(plain),
        }
        print_samples(plain, ways, options.rounds)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def make(folder: Path, num_bytes: int) -> Path:
    """Write a plain DCP checkpoint of about `num_bytes` in two files into `folder`."""
    numel = num_bytes // 4 // TENSORS
    state = {f"layers.{number}.weight": torch.randn(numel // 1024, 1024) for number in range(TENSORS)}
    dcp_save(state, storage_writer=FileSystemWriter(folder, thread_count=2), no_dist=True)
    return folder


def add_manifest(folder: Path) -> None:
    """Write a manifest with the digests of all files."""
    files = {path.name: FileRecord.of(path.read_bytes()) for path in sorted(folder.iterdir())}
    manifest = Manifest(
        step=1, kind=CheckpointKind.FULL, created_at=0.0, world_size=2, versions={}, files=files, tensors=Table()
    )
    (folder / layout.MANIFEST).write_bytes(manifest.to_json())


def verify(folder: Path) -> None:
    looked = look_at(folder)
    assert not looked.findings and not read_through(looked).findings


def read_raw(folder: Path, buffers: list[memoryview]) -> None:
    for path in data_files(folder):
        size = path.stat().st_size
        fd, free = os.open(path, os.O_RDONLY | os.O_DIRECT), list(buffers)

        def read(begin: int, buffer: memoryview, fd: int = fd) -> None:
            os.preadv(fd, [buffer], begin)

        def worker(free: list[memoryview] = free) -> Callable[[int], None]:
            buffer = free.pop()
            return partial(read, buffer=buffer)

        in_threads(range(0, size, REQUEST_BYTES), THREADS, worker)
        os.close(fd)


def print_samples(folder: Path, ways: dict[str, Callable[[], None]], rounds: int) -> None:
    nbytes = sum(path.stat().st_size for path in data_files(folder))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        names = list(ways)
        random.Random(number).shuffle(names)
        for name in names:
            make_cold(folder)
            begun = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - begun)
    print(f"{nbytes / (1 << 30):.1f} GiB in {len(data_files(folder))} files, {rounds} rounds")
    for name, samples in seconds.items():
        ratios = [raw / own for raw, own in zip(seconds["raw"], samples, strict=True)]
        speeds = " ".join(f"{nbytes / each / 1e9:5.2f}" for each in samples)
        print(
            f"{name:10} {speeds} GB/s; {statistics.median(ratios):.2f} x raw ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def make_cold(folder: Path) -> None:
    for path in data_files(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def data_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if layout.is_data_file(path.name)]


if __name__ == "__main__":
    sys.exit(main())
