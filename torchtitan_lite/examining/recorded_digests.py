"""The digests of a checkpoint that another library wrote, a folder or a single file, in one file of ours.

The file has the form of our manifest, without entries in its tables: it lists every file of the checkpoint with size
and digests. It has a name of its own, in the folder or elsewhere, so that the checkpoint stays the other library's: no
job resumes from it because of the record, and no rule removes it. What is recorded is what the files had in common
from `states_of` before the first read to the end of the last one: a file that changes meanwhile is refused.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from torchtitan_lite import __version__
from torchtitan_lite.disk.block_reader import DamagedRange
from torchtitan_lite.disk.durable import DISK, Durable, temporary_name
from torchtitan_lite.disk.plain_file import read_plain
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnreadable, FolderUnusable, reading
from torchtitan_lite.examining.file_digests import OnBytes, digests_of
from torchtitan_lite.examining.listed_tree import FileState, regular_file_stat
from torchtitan_lite.examining.other_libraries import transformers_step_of
from torchtitan_lite.log import listed
from torchtitan_lite.store import layout
from torchtitan_lite.store.described import allowed_description_bytes
from torchtitan_lite.store.files_of_ranks import FilesOfRanks, with_rank_files
from torchtitan_lite.store.manifest import CheckpointKind, Manifest
from torchtitan_lite.store.manifest_fields import file_path
from torchtitan_lite.store.place import home_of, on_disk


def write_record(path: Path, record: Manifest, durable: Durable = DISK) -> None:
    """Write `record` as `path`, in place of one that is there; a crash leaves the one or the other, and a hidden file.

    Raises `FolderUnusable` if the system refuses.
    """
    try:
        durable.write_atomically(path, record.to_json())
    except OSError as error:
        raise unwritable(path, error.strerror or str(error)) from error


def read_record(path: Path, folder: Path) -> Manifest | None:
    """Return what is recorded in `path` of the checkpoint in `folder`; None if there is no such file.

    Raises `CheckpointDamaged`, `CheckpointUnsafe`, `UnknownFormat` and OSError.
    """
    if not os.path.lexists(path):
        return None
    nbytes = sum(found.st_size for _, found in files_in(folder))
    try:
        return Manifest.parse(read_plain(path, allowed_description_bytes(nbytes)), str(path), file_path)
    except CheckpointDamaged as error:
        raise CheckpointDamaged(str(folder), error.finding) from None


def digests_path(place: Path) -> Path:
    """Return where the record of the checkpoint at `place` is unless its owner wants it elsewhere."""
    return place.with_name(f"{place.name}.{layout.DIGESTS}") if place.is_file() else place / layout.DIGESTS


def files_in(folder: Path, below: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path and the state of each file of the checkpoint `folder`, but of a record in it. Raises OSError."""
    if folder.is_file():
        yield folder.name, folder.lstat()
        return
    own = (layout.DIGESTS, temporary_name(layout.DIGESTS)) if not below else ()
    with os.scandir(folder / below) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if not below and transformers_step_of(entry.name) is not None:
                    continue  # A checkpoint of its own.
                yield from files_in(folder, f"{below}{entry.name}/")
            elif entry.name not in own:
                yield f"{below}{entry.name}", entry.stat(follow_symlinks=False)


def states_of(folder: Path) -> dict[str, FileState]:
    """Return the state of each file of the checkpoint in `folder`, by its path in it; not of a record.

    Raises `CheckpointUnsafe` for what is neither a file nor a folder, and `CheckpointUnreadable`.
    """
    home = on_disk(home_of(folder))
    with reading(folder):
        return {name: FileState.of(regular_file_stat(home / name)) for name, _ in files_in(folder)}


def take_digests(
    folder: Path, before: Mapping[str, FileState], kind: CheckpointKind, on_bytes: OnBytes = lambda count: None
) -> Manifest:
    """Return a record of all files of the checkpoint in `folder`, of this `kind`, whose states were `before`.

    Raises `CheckpointUnreadable` if one was changed, added or removed since, and for an error of the machine.
    """
    try:
        files = digests_of(on_disk(home_of(folder)), {name: state.size for name, state in before.items()}, on_bytes)
    except (DamagedRange, CheckpointUnreadable):
        _refuse_changes(folder, before)
        raise
    _refuse_changes(folder, before)
    return Manifest(
        step=layout.parse_step(folder.absolute().name) or 0,
        kind=kind,
        created_at=time.time(),
        world_size=1,
        versions={"torchtitan_lite": __version__},
        # Not in columns: another library's names of files may look like those of ranks without being any.
        files=with_rank_files(files, FilesOfRanks([], [], b"")),
    )


def unwritable(path: Path, cause: str) -> FolderUnusable:
    """Return the error for a record that cannot be written as `path`."""
    cause = f"no record can be written there ({cause}): write it elsewhere with --record-to FILE"
    return FolderUnusable(str(path.parent), cause)


def _refuse_changes(folder: Path, before: Mapping[str, FileState]) -> None:
    now = states_of(folder)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if changed:
        cause = f"written or removed while it was read: {listed(changed)}. Record it when it is complete"
        raise CheckpointUnreadable(str(folder), cause)
