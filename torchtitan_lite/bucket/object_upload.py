"""A file of a checkpoint that becomes an object: uploaded in parts, with digests computed on the way.

The digest is computed from the memory that is sent. The object appears complete or not at all. Contents that lie in
memory are sent from there; others are collected part by part, each in memory of its own, because a part that is tried
again must still be there: at most 64 MiB of them, unless the parts of a huge file are larger.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torchtitan_lite import faults
from torchtitan_lite.bucket.objects import ObjectPath, Objects, connect
from torchtitan_lite.config.address import parse_address
from torchtitan_lite.disk.block_writer import FileSource
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord, digest_blocks

PART_BYTES = 8 * BLOCK_BYTES
"""Of a part, at least. S3 takes no less than 5 MiB; a large part loses more when it has to be sent again."""
MOST_PARTS = 10_000
"""What S3 takes of one object."""
MEMORY_BYTES = 64 * BLOCK_BYTES
"""Parts in memory at a time, unless two are more: those under way, one that waits and one that is being filled."""


@dataclass(frozen=True)
class ObjectToUpload:
    """An object `key` below `address`, not yet written. A value: whoever has the bytes connects."""

    address: str
    key: str
    """step-5.0123456789abcdef/__0_0.distcp"""

    def write(self, source: FileSource) -> FileRecord:
        """Write the contents of `source`, durably; return the record of the file. Any thread.

        Raises OSError with the address in it; there is no object then, unless the last answer was lost.
        """
        return upload(connect(parse_address(self.address)), self.key, source)

    def __str__(self) -> str:
        return f"{self.address}/{self.key}"


def upload(objects: Objects, key: str, source: FileSource) -> FileRecord:
    """Write the contents of `source` to the object `key`; return the record of the file."""
    path = ObjectPath(f"{objects.address}/{key}")
    faults.point("open", path=path)
    part_bytes = part_bytes_of(source.num_bytes)
    at_a_time = max(1, MEMORY_BYTES // part_bytes - 3)
    digests: list[bytes] = []
    objects.upload(key, _upload_parts(source, part_bytes, path, digests), part_bytes, at_a_time)
    return source.record or FileRecord(source.num_bytes, b"".join(digests))


def part_bytes_of(num_bytes: int) -> int:
    """Return the size of the parts of a file of `num_bytes`: complete blocks, and no more parts than a store takes."""
    blocks = -(-num_bytes // (MOST_PARTS * BLOCK_BYTES))
    return max(PART_BYTES, blocks * BLOCK_BYTES)


def _upload_parts(source: FileSource, part_bytes: int, path: ObjectPath, digests: list[bytes]) -> Iterator[memoryview]:
    """Yield the parts of `source`; append to `digests` those of each part, unless they are known."""
    for begin in range(0, source.num_bytes, part_bytes):
        part = source.kept(begin, min(begin + part_bytes, source.num_bytes))
        if source.record is None:
            digests.append(digest_blocks(part))
        num_bytes = len(part)
        while num_bytes > 0:  # The rest of a short or torn part is written, or fails, next.
            num_bytes -= faults.limit("write", num_bytes, path=path)
        yield part
