"""Bytes as the contents of a file that is to be written."""

from __future__ import annotations

import mmap

from torchtitan_lite.disk.block_writer import ALIGNMENT, Bounced, InPlace, aligned
from torchtitan_lite.disk.digest import FileRecord


def in_place(data: bytes, record: FileRecord | None = None) -> InPlace:
    """`data` in memory as in an arena, with bytes after it that do not belong to the file."""
    memory = mmap.mmap(-1, aligned(len(data)) + ALIGNMENT)
    memory[:] = b"\xee" * len(memory)
    memory[: len(data)] = data
    return InPlace(memoryview(memory), len(data), record)


def bounced(data: bytes) -> Bounced:
    """`data` through a bounce buffer, as from tensors or an image."""

    def fill(buffer: memoryview, begin: int, end: int) -> None:
        assert 0 <= begin < end <= len(data) and end - begin <= len(buffer)
        buffer[: end - begin] = data[begin:end]

    return Bounced(len(data), fill)
