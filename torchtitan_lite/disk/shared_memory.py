"""Memory that several processes map: the file in memory of an arena, in huge pages where the kernel can give them.

Huge pages matter three times. A direct write of scattered small pages is cut into many requests (1 GiB took 1.5 times
as long by hand), to touch memory of small pages takes five times as long as to collapse it, and a start that loads from
an image would map half a million small pages, which takes longer than the copy. Most systems give shared memory no huge
pages by themselves (/sys/kernel/mm/transparent_hugepage/shmem_enabled is "never"), but collapse it where a process asks
for that (MADV_COLLAPSE, Linux 6.1) and has mapped it so that a huge page of the file can be one of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import weakref
from typing import Any

from torchtitan_lite.disk.read_requests import HUGE_PAGE_BYTES

_NO_ACCESS, _MAP_FIXED = 0, 0x10
_MADV_COLLAPSE = 25
MAP_FAILED = ctypes.c_void_p(-1).value
_COLLAPSED_BYTES = 256 << 20
"""Bytes of one request to collapse. Requests of few huge pages wait several milliseconds for each of them."""


def map_shared(fd: int, num_bytes: int) -> memoryview:
    """Return the first `num_bytes` of the file in memory `fd`, aligned to a huge page; forked children lack them.

    They are unmapped when nothing refers to them any more; `fd` may be closed before. Raises OSError.
    """
    size = -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    # A place is reserved first, larger by a huge page: no other mapping can come between.
    reserved = _mmap(None, size + HUGE_PAGE_BYTES, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        _mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        libc().munmap(reserved, size + HUGE_PAGE_BYTES)
        raise
    for begin, end in ((reserved, address), (address + size, reserved + size + HUGE_PAGE_BYTES)):
        if begin < end:
            libc().munmap(begin, end - begin)
    # What the system refuses, it does without.
    libc().madvise(address, size, mmap.MADV_DONTFORK)
    if num_bytes >= HUGE_PAGE_BYTES:
        libc().madvise(address, size, mmap.MADV_HUGEPAGE)
    # A subclass, which weak references can refer to.
    array: type[ctypes.Array[ctypes.c_char]] = type("Mapped", (ctypes.c_char * num_bytes,), {})
    mapped = array.from_address(address)
    # At exit threads may still use it.
    weakref.finalize(mapped, _unmap, address, size, os.getpid()).atexit = False
    return memoryview(mapped).cast("B")


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of `view`, which is writable."""
    return ctypes.addressof((ctypes.c_char * 0).from_buffer(view))


def allocate(view: memoryview) -> None:
    """Write zeros to all of `view`, so that the kernel gives its pages; huge ones if it can. Releases the GIL."""
    address = address_of(view)
    for begin in range(0, len(view), _COLLAPSED_BYTES):
        end = min(begin + _COLLAPSED_BYTES, len(view))
        whole = (end - begin) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if whole:
            for at in range(begin, begin + whole, HUGE_PAGE_BYTES):
                view[at] = 0  # One small page of each huge one has to be there.
            # Where it fails, small pages stay.
            libc().madvise(address + begin, whole, _MADV_COLLAPSE)
        ctypes.memset(address + begin, 0, end - begin)


def _mmap(address: int | None, size: int, access: int, flags: int, fd: int) -> int:
    found = libc().mmap(address, size, access, flags, fd, 0)
    if found == MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"{size} bytes could not be mapped: {os.strerror(code)}")
    return int(found)


def _unmap(address: int, size: int, pid: int) -> None:
    with contextlib.suppress(AttributeError):  # The interpreter ends.
        if os.getpid() == pid:  # A forked child has something else there.
            libc().munmap(address, size)


@functools.cache
def libc() -> Any:
    """Return the C library, with the types of what is called here and in `durable`."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate64.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    libc.renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return libc
