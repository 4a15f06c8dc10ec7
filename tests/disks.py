"""Disks that fail: the one failing test double of `Durable`, for the tests of the store and of the checkpoint.

A real full file system is tested on one (tests/checkpoint/saving/test_full_disk.py), a job under a fault of the system
with TORCHTITAN_LITE_FAULT.
"""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.store.filled import without_token
from torchtitan_lite import faults
from torchtitan_lite.disk import block_reader
from torchtitan_lite.disk.durable import Durable


@contextmanager
def injected(spec: str, rank: int = 0) -> Iterator[None]:
    """Have the faults of `spec` happen meanwhile."""
    faults.install(spec, rank=rank)
    try:
        yield
    finally:
        faults.install("", rank=rank)


def wait_for_no_server() -> None:
    """Try a read again at once: no server comes back during a test."""
    block_reader.PAUSES_SECONDS = (0.0, 0.0, 0.0)


class FailingDisk(Durable):
    """Fails `operations` with the error `code`: from call number `after` on, `times` times, for paths named `name`.

    Calls are counted over all operations and threads, from 0. Without `name`, all paths match.
    """

    def __init__(
        self, *operations: str, code: int = errno.ENOSPC, after: int = 0, times: int = 10**9, name: str = ""
    ) -> None:
        self.operations, self.code, self.after, self.times, self.name = operations, code, after, times, name
        self.num_calls = 0
        self._lock = threading.Lock()

    def rename(self, src: Path, dst: Path) -> None:
        self._answer("rename", src)
        super().rename(src, dst)

    def write_file(self, path: Path, data: bytes) -> None:
        self._answer("write_file", path)
        super().write_file(path, data)

    def make_dir(self, path: Path) -> None:
        self._answer("make_dir", path)
        super().make_dir(path)

    def remove_tree(self, path: Path) -> None:
        self._answer("remove_tree", path)
        super().remove_tree(path)

    def allocate(self, fd: int, num_bytes: int) -> None:
        self._answer("allocate")
        super().allocate(fd, num_bytes)

    def set_size(self, fd: int, num_bytes: int) -> None:
        self._answer("set_size")
        super().set_size(fd, num_bytes)

    def write_at(self, fd: int, data: memoryview, offset: int) -> int:
        self._answer("write_at")
        return super().write_at(fd, data, offset)

    def fsync_file(self, fd: int) -> None:
        self._answer("fsync_file")
        super().fsync_file(fd)

    def _answer(self, operation: str, path: Path | None = None) -> None:
        if operation not in self.operations or (self.name and (path is None or without_token(path.name) != self.name)):
            return
        with self._lock:
            number, self.num_calls = self.num_calls, self.num_calls + 1
        if self.after <= number < self.after + self.times:
            details: Any = (str(path),) if path is not None else ()
            raise OSError(self.code, os.strerror(self.code), *details)


SMALL_BYTES = 2 << 20
"""Size of a `small_disk`."""


@contextmanager
def small_disk(folder: Path, num_bytes: int = SMALL_BYTES) -> Iterator[Path]:
    """Mount a small file system at `folder`, which need not exist; skip the test where that is not possible."""
    folder.mkdir()
    try:
        mounted = _mount("-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder))
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if mounted.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, *, leave_bytes: int = 0) -> Path:
    """Create a file that leaves only that many bytes free on `disk`."""
    filler = disk / "filler"
    system = os.statvfs(disk)
    with filler.open("wb", buffering=0) as file:
        file.write(bytes(system.f_bavail * system.f_frsize - leave_bytes))
    return filler


def make_read_only(disk: Path) -> None:
    """Make the `small_disk` read-only, also for root."""
    mounted = _mount("-o", "remount,ro", str(disk))
    assert mounted.returncode == 0, mounted.stderr


def _mount(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
