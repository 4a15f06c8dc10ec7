"""Private memory for disk requests.

Requests have private pages, huge ones where the system has them: the disk's driver splits a direct request over a
thousand scattered small pages into many. Private memory and direct I/O need care where a process forks meanwhile
(open(2)): a write after the fork would move the page away from under the disk. So a forked child does not get this
memory at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

HUGE_PAGE_BYTES = 2 << 20
"""On x86-64, and on arm64 with pages of 4 KiB; elsewhere only the alignment of the memory."""


def request_memory(num_bytes: int) -> memoryview:
    """Return `num_bytes` zero bytes, aligned to a huge page. A forked child must not touch them.

    Pages that are never touched take no memory.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=flags)
    # Not Linux, or a kernel without huge pages.
    with contextlib.suppress(AttributeError, OSError):
        mapping.madvise(mmap.MADV_DONTFORK)
        # Smaller memory would be rounded up to a huge page.
        if num_bytes >= HUGE_PAGE_BYTES:
            mapping.madvise(mmap.MADV_HUGEPAGE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE_PAGE_BYTES
    return memoryview(mapping)[begin : begin + num_bytes]
