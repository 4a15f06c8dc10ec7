"""Take the digests of a checkpoint's files, or compare every block of them with its digest.

Threads take spans of blocks from all files, on disk each with a reader of its own, so that none waits for another at
the end of a file. A file is dropped from the page cache first: what the disk has is compared, not a copy in memory.
Memory: `THREADS` x 5 MiB; of an object store, `THREADS` times that of its reader. Raises `CheckpointUnreadable` for an
error of the machine.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.checkpoint.reading.files import StoredFiles, files_of
from torchtitan_lite.disk.block_reader import THREADS, DamagedRange
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord, digest_blocks, num_blocks
from torchtitan_lite.disk.read_requests import Piece, ReadsBlocks
from torchtitan_lite.disk.threads import in_threads

SPAN_BLOCKS = 32
"""Blocks that a thread reads at a time."""
_TAKEN_BLOCKS = 4
"""The same where digests are taken, with memory for all of them."""
_BLOCKS_IN_ORDER = 64
"""The same where one thread reads a file, between two reports of progress."""
MOST_DAMAGED_BLOCKS = 64
"""In one file; the rest of it is not read then, because each of them is read three times."""

OnBytes = Callable[[int], None]
"""Receives the number of bytes that were read since its last call."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    file: str
    """The file, by name; empty if the finding is about no single one."""
    text: str
    """What is wrong."""
    keys: tuple[str, ...] = ()
    """The tensors and objects that it affects."""


def digests_of(folder: Path, sizes: Mapping[str, int], on_bytes: OnBytes) -> dict[str, FileRecord]:
    """Return size and digests of each file of `folder` in `sizes`, which maps names to bytes.

    Raises `DamagedRange` for a file that is shorter.
    """
    files = files_of(folder)
    files.drop_from_cache(sizes)
    spans = [(file, span) for file, size in sizes.items() for span in block_ranges(size, _TAKEN_BLOCKS)]
    digests: dict[tuple[str, range], bytes] = {}
    lock = threading.Lock()

    def make_worker() -> Callable[[tuple[str, range]], None]:
        reader, room = files.thread_reader(), memoryview(bytearray(_TAKEN_BLOCKS * BLOCK_BYTES))

        def take(span: tuple[str, range]) -> None:
            file, blocks = span
            begin = blocks.start * BLOCK_BYTES
            data = room[: min(blocks.stop * BLOCK_BYTES, sizes[file]) - begin]
            reader.read(files.path_of(file), None, [Piece(begin, data)])
            digests[span] = digest_blocks(data)
            with lock:
                on_bytes(len(data))

        return take

    in_threads(spans, max(1, min(THREADS, len(spans))), make_worker)
    blocks: dict[str, bytearray] = {file: bytearray() for file in sizes}
    for file, span in spans:
        blocks[file] += digests[file, span]
    return {file: FileRecord(size, bytes(blocks[file])) for file, size in sizes.items()}


def compare_digests(
    files: StoredFiles,
    records: Mapping[str, FileRecord],
    contents: Contents | None,
    on_bytes: OnBytes,
    make_reader: Callable[[], ReadsBlocks],
) -> list[Finding]:
    """Read all files in `records` and return what is damaged. Each thread makes its reader: none waits for another."""
    files.drop_from_cache(records)
    spans = [(file, span) for file in sorted(records) for span in block_ranges(records[file].size, SPAN_BLOCKS)]
    damaged: dict[str, list[int]] = {file: [] for file in records}
    skipped: dict[str, int] = {}
    lock = threading.Lock()

    def make_worker() -> Callable[[tuple[str, range]], None]:
        reader = make_reader()

        def compare(span: tuple[str, range]) -> None:
            file, blocks = span
            is_skipped = len(damaged[file]) >= MOST_DAMAGED_BLOCKS
            found = [] if is_skipped else _damaged(reader, files.path_of(file), records[file], blocks)
            with lock:
                damaged[file] += found
                if is_skipped:
                    skipped[file] = min(blocks.start, skipped.get(file, blocks.start))
                else:
                    on_bytes(min(blocks.stop * BLOCK_BYTES, records[file].size) - blocks.start * BLOCK_BYTES)

        return compare

    in_threads(spans, max(1, min(THREADS, len(spans))), make_worker)
    findings = []
    for file in sorted(records):
        for first, last in _consecutive_runs(sorted(damaged[file])):
            begin, end = first * BLOCK_BYTES, min((last + 1) * BLOCK_BYTES, records[file].size)
            keys = () if contents is None else tuple(contents.keys_in(file, begin, end))
            findings.append(Finding(file, f"bytes {begin} to {end} are not what was saved: another digest", keys))
        if file in skipped:
            begin = skipped[file] * BLOCK_BYTES
            keys = () if contents is None else tuple(contents.keys_in(file, begin, math.inf))
            findings.append(Finding(file, f"the bytes from {begin} on were not read after so much damage", keys))
    return findings


def verify_file(reader: ReadsBlocks, path: Path, record: FileRecord, on_bytes: Callable[[int], object]) -> None:
    """Read the file `path` from start to end. Raises `DamagedRange` unless it has the digests in `record`."""
    for blocks in block_ranges(record.size, _BLOCKS_IN_ORDER):
        reader.verify(path, record, blocks)
        on_bytes(min(blocks.stop * BLOCK_BYTES, record.size) - blocks.start * BLOCK_BYTES)


def block_ranges(size: int, each: int) -> Iterator[range]:
    """Yield the blocks of a file of `size` bytes, `each` at a time."""
    count = num_blocks(size)
    return (range(begin, min(begin + each, count)) for begin in range(0, count, each))


def _damaged(reader: ReadsBlocks, path: Path, record: FileRecord, blocks: range) -> list[int]:
    """Return those of `blocks` that have another digest, twice."""
    if are_sound(reader, path, record, blocks):
        return []
    return [block for block in blocks if not are_sound(reader, path, record, [block])]


def are_sound(reader: ReadsBlocks, path: Path, record: FileRecord, blocks: Sequence[int]) -> bool:
    """Return whether all of `blocks` of the file `path` have the digests in `record`."""
    try:
        reader.verify(path, record, blocks)
    except DamagedRange:
        return False
    return True


def _consecutive_runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last of each run of consecutive `numbers`, which ascend."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        first = runs.pop()[0] if runs and runs[-1][1] == number - 1 else number
        runs.append((first, number))
    return runs
