"""Digests of what is on disk.

A file is digested in blocks that cover it without gaps, so that a part of it can be read and checked
without the rest, and by several threads in any order. The digest of the file is made from those of
its blocks. xxh3 finds what disks, memory and cut writes do; it is no protection against somebody
who means it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BLOCK_BYTES = 1 << 20
"""Bytes of a file that one digest is of; the last block may be shorter. Part of the format."""
DIGEST_BYTES = 8
"""Bytes of a block's digest."""


BlockDigest = xxhash.xxh3_64
"""Takes a block's bytes piece by piece, with `update`; `digest` is the 8 bytes of the digest of all of them."""


def block_digest(data: ReadableBuffer) -> bytes:
    """The 8 bytes of the digest of `data`. Lets other threads run."""
    return xxhash.xxh3_64_digest(data)


def digest_blocks(data: ReadableBuffer) -> bytes:
    """The digests of all blocks of `data`, one after another; `data` begins at a block's border."""
    view = memoryview(data).cast("B")
    return b"".join(block_digest(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES))


def file_digest(blocks: bytes, size: int) -> str:
    """32 hexadecimal digits: the digest of a file of `size` bytes whose blocks have the digests `blocks`."""
    state = xxhash.xxh3_128(blocks)
    state.update(size.to_bytes(8, "big"))
    return state.hexdigest()


@dataclass(frozen=True)
class FileRecord:
    """What is known of one file."""

    size: int
    """In bytes."""
    blocks: bytes = b""
    """The digests of its blocks, one after another; empty if it has none."""

    @classmethod
    def of(cls, data: bytes) -> FileRecord:
        """The record of a file that holds `data`."""
        return cls(len(data), digest_blocks(data))

    @property
    def digest(self) -> str:
        """32 hexadecimal digits: the digest of the file; empty if it has none."""
        return file_digest(self.blocks, self.size) if self.blocks else ""


def text_digest(parts: Iterable[ReadableBuffer]) -> str:
    """32 hexadecimal digits: the digest of `parts` one after another."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def num_blocks(size: int) -> int:
    """How many blocks a file of `size` bytes has."""
    return -(-size // BLOCK_BYTES)
