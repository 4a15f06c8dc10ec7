"""Whether a checkpoint that was set aside is what was committed, so that it may have its place again.

Every byte of a damaged one is read and compared with its digest. Of an abandoned one, in which nothing was ever wrong,
the sizes of the files are: a load verifies it anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torchtitan_lite.checkpoint.reading.files import files_of
from torchtitan_lite.disk.block_reader import DamagedRange
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord, num_blocks
from torchtitan_lite.disk.reads_blocks import ReadsBlocks
from torchtitan_lite.errors import CheckpointDamaged
from torchtitan_lite.store import layout
from torchtitan_lite.store.files_of_ranks import recorded_sizes
from torchtitan_lite.store.protocol import CORRUPT, SetAside
from torchtitan_lite.store.rank_records import RecordedFiles, RecordsOfRanks

_BLOCKS_AT_A_TIME = 64


def check_set_aside(aside: SetAside, advance: Callable[[int], object]) -> None:
    """Raise CheckpointDamaged unless `aside` is what was committed.

    Calls `advance` with the number of bytes of each read. Raises `CheckpointUnreadable`, OSError.
    """
    place, manifest, files = aside.folder, aside.manifest, files_of(aside.folder)
    sizes = recorded_sizes(manifest.files)
    findings = [files.size_finding(name, size) for name, size in sorted(sizes.items())]
    _refuse(aside, findings)
    if aside.why == CORRUPT:
        reader = files.reader()
        # They have these sizes.
        records = RecordsOfRanks(manifest, str(place), reader, files.path_of, lambda names: sizes)
        for name, record in sorted(RecordedFiles(manifest, records).items()):
            _refuse(aside, [_digest_finding(reader, files.path_of(name), record, advance)])


def _refuse(aside: SetAside, findings: list[str]) -> None:
    if finding := next(filter(None, findings), ""):
        raise CheckpointDamaged(str(aside.folder), finding)


def _digest_finding(reader: ReadsBlocks, path: Path, record: FileRecord, advance: Callable[[int], object]) -> str:
    """Return what is wrong with the bytes of the file `path`; the empty string if nothing is."""
    if record.size and not record.blocks:
        return f"{path.name} has no digests in {layout.MANIFEST}, so it cannot be verified"
    count = num_blocks(record.size)
    for begin in range(0, count, _BLOCKS_AT_A_TIME):
        end = min(begin + _BLOCKS_AT_A_TIME, count)
        try:
            reader.verify(path, record, range(begin, end))
        except DamagedRange as damage:
            return f"{path.name}: bytes {damage.begin} to {damage.end} are not those that were written"
        advance(min(end * BLOCK_BYTES, record.size) - begin * BLOCK_BYTES)
    return ""
