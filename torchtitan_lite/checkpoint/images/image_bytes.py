"""What a load does with the bytes of images before the states read them: verify all of them, or lend a few.

On several hosts each rank has the images of its own host only. What all ranks have alike (step counts, norms that are
not sharded) is in the image of one rank, so the ranks lend each other these parts, verified, before they load.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan_lite.checkpoint.images.files import FilesInMemory
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.checkpoint.resume.source import LoadSource
from torchtitan_lite.disk.block_reader import DamagedRange
from torchtitan_lite.errors import CheckpointDamaged

MOST_BYTES = 1 << 20
"""Of one tensor or object that is lent."""
MOST_BYTES_OF_A_RANK = 64 << 20
"""Of all together. A rank with more lends nothing: replicated weights come from the disk."""


def verify_images(source: LoadSource, files: FilesInMemory, number: int, count: int) -> None:
    """Verify every byte of this rank's share of `files`. Raise `CheckpointDamaged`."""
    with _findings(source):
        files.verify(number, count)


def lent_parts(source: LoadSource, files: FilesInMemory) -> dict[str, dict[int, bytes]]:
    """Return what this rank lends: the small whole tensors and objects of its own file. Raise `CheckpointDamaged`."""
    contents = CheckpointFolder(source.path, files=files).contents
    ranges: dict[str, list[tuple[int, int]]] = {}
    for kind, places in contents.table.places_by_kind.items():
        if 0 < kind.nbytes <= MOST_BYTES:
            ranges.setdefault(kind.file, []).extend((at, kind.nbytes) for at in places)
    for stored in contents.objects.values():
        if stored.item is not None and 0 < stored.item.length <= MOST_BYTES:
            ranges.setdefault(stored.item.file, []).append((stored.item.offset, stored.item.length))
    few = {file: parts for file, parts in ranges.items() if sum(count for _, count in parts) <= MOST_BYTES_OF_A_RANK}
    with _findings(source):
        return files.lend(few)


@contextmanager
def _findings(source: LoadSource) -> Iterator[None]:
    """Raise damage that the block finds as damage of `source`."""
    try:
        yield
    except DamagedRange as error:
        finding = f"bytes {error.begin} to {error.end} of {error.path.name}: {error.finding}"
        raise CheckpointDamaged(str(source.path), finding) from None
