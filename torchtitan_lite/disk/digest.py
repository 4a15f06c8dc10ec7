"""Digests of files on disk.

A file is digested in blocks that cover it without gaps, so that any part can be read and checked without the rest,
by several threads in any order. xxh3 detects what disks, memory and cut writes do; it does not protect against
deliberate changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BLOCK_BYTES = 1 << 20
"""Bytes of a file per digest; the last block may be shorter. Part of the file format."""
DIGEST_BYTES = 8
"""Bytes of the digest of one block."""


# xxh3 costs almost nothing next to a write. A cryptographic hash costs more and would not protect the file: whoever can
# change it can change the manifest, too.
BlockDigest = xxhash.xxh3_64
"""Hash state of one block: `update` adds bytes, `digest` returns the 8 bytes of the digest of all of them."""


def block_digest(data: ReadableBuffer) -> bytes:
    """Return the 8-byte digest of `data`. Releases the GIL."""
    return xxhash.xxh3_64_digest(data)


def digest_blocks(data: ReadableBuffer) -> bytes:
    """Return the digests of all blocks of `data`, concatenated; `data` begins at a block boundary."""
    view = memoryview(data).cast("B")
    return b"".join(block_digest(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES))


@dataclass(frozen=True)
class FileRecord:
    """Size and digests of one file."""

    size: int
    """Bytes."""
    blocks: bytes = b""
    """The digests of its blocks, concatenated; empty if it has none."""

    @classmethod
    def of(cls, data: ReadableBuffer) -> FileRecord:
        """Return the record of a file with the contents `data`. Releases the GIL block by block."""
        with memoryview(data) as view:
            return cls(view.nbytes, digest_blocks(view))


def text_digest(parts: Iterable[ReadableBuffer]) -> str:
    """Return the digest of the concatenated `parts` as 32 hex digits."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def num_blocks(size: int) -> int:
    """Return the number of blocks of a file of `size` bytes."""
    return -(-size // BLOCK_BYTES)
