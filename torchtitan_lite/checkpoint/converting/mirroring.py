"""A copy of a checkpoint of ours on a disk: the same files, byte for byte, with the same manifest.

A copy that was cut is continued. Its blocks have digests in the manifest, so what lies there is kept where it is right,
and only the rest is fetched. The manifest comes last.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite.checkpoint.converting.new_file import Advance, read_back
from torchtitan_lite.checkpoint.examining.opened import OpenedCheckpoint
from torchtitan_lite.checkpoint.reading.files import files_of
from torchtitan_lite.disk.block_reader import BlockReader, DamagedRange
from torchtitan_lite.disk.digest import BLOCK_BYTES, DIGEST_BYTES, FileRecord, block_digest
from torchtitan_lite.disk.durable import DISK, naming
from torchtitan_lite.disk.read_requests import Piece
from torchtitan_lite.disk.reads_blocks import ReadsBlocks
from torchtitan_lite.errors import CheckpointDamaged
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import Manifest

_SPAN_BYTES = 32 * BLOCK_BYTES
"""Fetched at a time; in memory, too."""


def mirror(opened: OpenedCheckpoint, manifest: Manifest, folder: Path, advance: Advance) -> None:
    """Write the files of `opened`, and `manifest` as it is there, to `folder`, synced, and check them.

    `folder` may have files of a copy that was cut; others go. Raises CheckpointDamaged, CheckpointUnreadable and the
    OSError of the disk; what is right in `folder` is taken by the next call.
    """
    files = files_of(opened.folder)
    reader = files.reader()
    for left in folder.iterdir():
        if left.name not in manifest.files:
            DISK.remove_tree(left) if left.is_dir() else DISK.remove_file(left)
    for name, record in manifest.files.items():
        try:
            _copy(files.path_of(name), record, reader, folder / name, advance)
        except DamagedRange as damage:
            finding = f"bytes {damage.begin} to {damage.end} of {name}: {damage.finding}"
            keys = opened.contents.keys_in(name, damage.begin, damage.end)
            raise CheckpointDamaged(str(opened.folder), finding, keys) from None
    on_disk = BlockReader()
    for name, record in manifest.files.items():
        read_back(folder / name, record, on_disk, advance)
    with files.opened(layout.MANIFEST) as fd, os.fdopen(fd, "rb", closefd=False) as file:
        data = file.read()
    Manifest.parse(data, str(files.path_of(layout.MANIFEST)))  # It has a digest of itself.
    DISK.write_file(folder / layout.MANIFEST, data)
    DISK.fsync_dir(folder)


def _copy(source: Path, record: FileRecord, reader: ReadsBlocks, to: Path, advance: Advance) -> None:
    if record.size and not record.blocks:
        raise DamagedRange(source, 0, record.size, f"there are no digests of it in {layout.MANIFEST}")
    buffer = memoryview(bytearray(min(_SPAN_BYTES, record.size)))
    with _open(to) as fd:
        DISK.set_size(fd, record.size)
        for begin in range(0, record.size, _SPAN_BYTES):
            span = buffer[: min(_SPAN_BYTES, record.size - begin)]
            _read(fd, span, begin)
            if missing := _missing(record, begin, span):
                reader.read(source, record, [Piece(at, block) for at, block in missing])
                for at, block in missing:
                    _write(fd, block, at)
            advance(len(span))
        DISK.fsync_file(fd)


def _missing(record: FileRecord, begin: int, span: memoryview) -> list[tuple[int, memoryview]]:
    """Return where each block without its digest begins, and its bytes in `span`, those of the file from `begin` on."""
    missing = []
    for at in range(0, len(span), BLOCK_BYTES):
        digest = (begin + at) // BLOCK_BYTES * DIGEST_BYTES
        block = span[at : at + BLOCK_BYTES]
        if block_digest(block) != record.blocks[digest : digest + DIGEST_BYTES]:
            missing.append((begin + at, block))
    return missing


def _read(fd: int, into: memoryview, begin: int) -> None:
    while into:
        # The file has its size, so this is never the end of it.
        count = os.preadv(fd, [into], begin)
        into, begin = into[count:], begin + count


def _write(fd: int, data: memoryview, begin: int) -> None:
    while data:
        written = DISK.write_at(fd, data, begin)
        data, begin = data[written:], begin + written


@contextmanager
def _open(path: Path) -> Iterator[int]:
    """Yield a descriptor of `path`, which may be there already."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        with naming(path):
            yield fd
    finally:
        os.close(fd)
