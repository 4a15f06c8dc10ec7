"""Which parts of a file are in the page cache."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_LOOKS = 9
"""Pages of a range to check, spread evenly from the first to the last."""


@contextmanager
def look_into_cache(fd: int, size: int) -> Iterator[Callable[[int, int], bool] | None]:
    """Yield a function that returns whether the page cache has bytes [begin, end) of the file `fd`.

    It checks a sample of the pages, because to check all of them takes as long as to read some: neighbouring pages
    come and go together, and a wrong answer costs only time. Yields None where the system cannot say.
    """
    libc = _libc_with_mincore()
    # Not Python's `mmap`: ctypes gives no address of a mapping that is read-only.
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0) if libc is not None and size else None
    if libc is None or address in (None, _MAP_FAILED):
        yield None
        return

    def has(begin: int, end: int) -> bool:
        state = ctypes.c_ubyte()
        first, last = begin // mmap.PAGESIZE, (end - 1) // mmap.PAGESIZE
        for number in range(_LOOKS):
            page = first + (last - first) * number // (_LOOKS - 1)
            if libc.mincore(address + page * mmap.PAGESIZE, 1, ctypes.byref(state)) == 0 and not state.value & 1:
                return False
        return True

    try:
        yield has
    finally:
        libc.munmap(address, size)


_MAP_FAILED = ctypes.c_void_p(-1).value


@cache
def _libc_with_mincore() -> Any:
    """Return the C library if it has mincore, else None."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        return None
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return libc
