"""The manifest of a checkpoint together with the records of its ranks, read from its files."""

from __future__ import annotations

from collections.abc import Iterable

from torchtitan_lite.checkpoint.format.completed import completed
from torchtitan_lite.checkpoint.reading.files import Files
from torchtitan_lite.collection import no_collection
from torchtitan_lite.errors import CheckpointDamaged
from torchtitan_lite.store.manifest import Manifest
from torchtitan_lite.store.place import Place
from torchtitan_lite.store.rank_records import RecordsOfRanks


def complete_manifest(files: Files, folder: Place) -> Manifest | None:
    """Return our manifest with what the records of all ranks add to it; None in a checkpoint of plain DCP.

    Raises as `Files.manifest`; `CheckpointDamaged` also for a wrong record.
    """
    manifest = files.manifest()
    return None if manifest is None else complete(manifest, records_of(files, folder, manifest), folder)


@no_collection()
def complete(
    manifest: Manifest, records: RecordsOfRanks, folder: Place, rank_files: Iterable[str] | None = None
) -> Manifest:
    """Return `manifest` with what those of `records` add whose ranks wrote `rank_files`, None: all.

    Raises `CheckpointDamaged` for a wrong record, and what their reader raises.
    """
    try:
        return completed(manifest, records, rank_files)
    except CheckpointDamaged:
        raise
    except ValueError as error:
        raise CheckpointDamaged(str(folder), f"the records of its ranks do not fit together: {error}") from None


def records_of(files: Files, folder: Place, manifest: Manifest) -> RecordsOfRanks:
    """Return the records of the ranks that wrote the checkpoint in `folder`; reads nothing yet."""
    return RecordsOfRanks(manifest, str(folder), files.reader(), files.path_of, files.sizes_of)
