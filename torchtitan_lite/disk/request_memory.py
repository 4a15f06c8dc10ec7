"""Memory that requests to a disk go through.

Private pages, in huge pages where the system gives them: the disk's driver cuts a direct request over a thousand
scattered small pages into many. Private memory and direct I/O need care where a process forks meanwhile (open(2)):
a write after the fork would move the page away from under the disk. So a forked child does not have this memory at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

HUGE_PAGE_BYTES = 2 << 20
"""Of x86-64, and of arm64 with pages of 4 KiB; elsewhere only a border that memory begins at."""


def request_memory(num_bytes: int) -> memoryview:
    """Return `num_bytes` zero bytes that begin at a huge page's border; a forked child must not touch them.

    What is never used of them is never taken from the system.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=flags)
    mapping.madvise(mmap.MADV_DONTFORK)
    if num_bytes >= HUGE_PAGE_BYTES:  # Less would be rounded up.
        with contextlib.suppress(AttributeError, OSError):  # A kernel without huge pages.
            mapping.madvise(mmap.MADV_HUGEPAGE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE_PAGE_BYTES
    return memoryview(mapping)[begin : begin + num_bytes]
