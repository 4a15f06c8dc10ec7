"""The raw disk: files written and read directly, and the page cache filled and emptied.

Every disk figure is divided by that of `Raw`: the same number of bytes, in requests of the same size as ours, with as
many threads, written with direct I/O from memory that is already touched, and read into such memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
from pathlib import Path

from torchtitan_lite.disk import block_reader, block_writer, read_requests
from torchtitan_lite.disk.threads import in_threads

NAME = "raw"


class Touched:
    """Page-aligned memory of `num_bytes`, all of it touched."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.memory = mmap.mmap(-1, -(-max(num_bytes, 1) // block_writer.ALIGNMENT) * block_writer.ALIGNMENT)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        ctypes.memset(self.address, 1, len(self.memory))

    def view(self) -> memoryview:
        """Return the memory up to the end of its last page."""
        return memoryview(self.memory)


class Raw:
    """A file with the bytes of `buffer`."""

    write_threads, write_bytes = block_writer.Bounced.threads, block_writer.Bounced.request_bytes
    read_threads, read_bytes = block_reader.THREADS, read_requests.REQUEST_BYTES

    def __init__(self, buffer: Touched) -> None:
        self._view = buffer.view()

    def write(self, folder: Path) -> None:
        """Write the file and sync it."""
        fd = os.open(folder / NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
        try:
            os.posix_fallocate(fd, 0, len(self._view))
            in_threads(self._begins(self.write_bytes), self.write_threads, lambda: lambda begin: self._write(fd, begin))
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def read(self, folder: Path, *, warm: bool) -> None:
        """Read the file into the buffer; `warm`: through the page cache."""
        fd = os.open(folder / NAME, os.O_RDONLY | (0 if warm else os.O_DIRECT))
        try:
            in_threads(self._begins(self.read_bytes), self.read_threads, lambda: lambda begin: self._read(fd, begin))
        finally:
            os.close(fd)

    def _begins(self, request_bytes: int) -> range:
        return range(0, len(self._view), request_bytes)

    def _write(self, fd: int, begin: int) -> None:
        data = self._view[begin : begin + self.write_bytes]
        if os.pwrite(fd, data, begin) != len(data):
            raise OSError("a short write")

    def _read(self, fd: int, begin: int) -> None:
        data = self._view[begin : begin + self.read_bytes]
        if os.preadv(fd, [data], begin) != len(data):
            raise OSError("a short read")


def takes_direct(folder: Path) -> bool:
    """Return whether `folder` supports direct I/O, which `Raw` needs."""
    try:
        Raw(Touched(block_writer.ALIGNMENT)).write(folder)
    except (OSError, AttributeError):
        return False
    finally:
        (folder / NAME).unlink(missing_ok=True)
    return True


def sync_files(folder: Path) -> None:
    """Sync all files under `folder`."""
    for path in files(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def make_cold(folder: Path) -> float:
    """Drop the files under `folder` from the page cache. Return the part of them that is still in it."""
    sync_files(folder)
    for path in files(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return cached_part(folder)


def make_warm(folder: Path) -> float:
    """Read the files under `folder` into the page cache. Return the part of them that is in it."""
    scratch = bytearray(8 << 20)
    for path in files(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(scratch):
                pass
    return cached_part(folder)


def cached_part(folder: Path) -> float:
    """Return the part, 0 to 1, of the files under `folder` that is in the page cache (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    cached = pages = 0
    for path in files(folder):
        size = path.stat().st_size
        if size == 0:
            continue
        fd = os.open(path, os.O_RDONLY)
        try:
            address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
            count = -(-size // mmap.PAGESIZE)
            found = (ctypes.c_ubyte * count)()
            libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found)
            libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
        finally:
            os.close(fd)
        pages += count
        cached += sum(byte & 1 for byte in bytes(found))
    return cached / pages if pages else 0.0


def files(folder: Path) -> list[Path]:
    """Return all files under `folder`."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def num_bytes(folder: Path) -> int:
    """Return the bytes of all files under `folder`."""
    return sum(path.stat().st_size for path in files(folder))


def remove(folder: Path) -> None:
    """Remove `folder`, and wait until the disk has done the work of it."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()
