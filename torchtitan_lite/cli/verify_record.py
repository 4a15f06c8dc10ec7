"""The records of digests that `verify` writes of checkpoints of other libraries: where each is, and whether it may be.

Ours have digests in their manifest, and get no record.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnsafe, ConfigError
from torchtitan_lite.store import layout
from torchtitan_lite.store.place import Place, on_disk

if TYPE_CHECKING:
    from torchtitan_lite.checkpoint.examining.file_digests import OnBytes
    from torchtitan_lite.checkpoint.format.contents import Contents
    from torchtitan_lite.disk.listed_tree import FileState


@dataclass(frozen=True)
class DigestRecords:
    """The records of checkpoints that other libraries wrote: where they are, and what becomes of them."""

    elsewhere: Path | None
    """The file of a single one; None for records in the folders."""
    writes: bool
    """Whether one that is missing is written."""
    again: bool
    """Whether one that is there is replaced."""

    @classmethod
    def of_options(cls, *, record: bool, record_to: str, again: bool, sizes: bool) -> DigestRecords:
        """Return what becomes of records by the options of `verify`. Raise ConfigError for those that do not fit."""
        is_given = record or bool(record_to)
        if is_given and sizes:
            raise ConfigError("--sizes reads no byte, so there is nothing to record: leave one of the two options out")
        if record and record_to:
            raise ConfigError("--record writes into the checkpoint's folder, --record-to elsewhere: give one of them")
        if again and not is_given:
            raise ConfigError("--again replaces a record: it needs --record or --record-to FILE")
        return cls(Path(record_to).absolute() if record_to else None, is_given, again)

    def of(self, folder: Path) -> Path:
        """Return where the record of the checkpoint in `folder` is."""
        from torchtitan_lite.checkpoint.examining.recorded_digests import record_of

        return self.elsewhere or record_of(folder)

    def known_of(self, place: Place) -> Path | None:
        """Return where the record is that the checkpoint at `place` is compared with; None in an object store."""
        is_on_disk = place.is_dir() or place.is_file()
        return self.of(on_disk(place).absolute()) if is_on_disk and not self.again else None

    def refuse(self, folders: Sequence[Place], is_single: bool) -> None:
        """Raise ConfigError or FolderUnusable where no record can be written, before anything is read."""
        if self.elsewhere is not None and not is_single:
            raise ConfigError("--record-to FILE is the record of one checkpoint: name one, as FOLDER/step-10")
        for place in folders if self.writes else ():
            folder = on_disk(place, ", where every checkpoint has digests already")
            if os.path.lexists(folder / layout.MANIFEST):
                if is_single:
                    raise ConfigError(f"{folder} has digests in its {layout.MANIFEST}: verify it without a record")
                continue
            path = self.of(folder.absolute())
            if self.elsewhere is not None:
                _refuse_place(path, folder)
            if (self.again or not path.exists()) and not os.access(path.parent, os.W_OK):
                from torchtitan_lite.checkpoint.examining.recorded_digests import unwritable

                raise unwritable(path, "it is read-only" if path.parent.is_dir() else "it does not exist")

    def write(self, folder: Path, before: Mapping[str, FileState], contents: Contents, on_bytes: OnBytes) -> Path:
        """Write the record of the intact checkpoint in `folder`, whose files were as `before`; return where it is.

        Raises what `take_digests` and `RecordedDigests.write` raise.
        """
        from torchtitan_lite.checkpoint.examining.opened import kind_of
        from torchtitan_lite.checkpoint.examining.recorded_digests import take_digests

        path = self.of(folder)
        step = layout.parse_step(folder.absolute().name)
        take_digests(folder, before, on_bytes).write(path, step, kind_of(contents))
        return path


def _refuse_place(record: Path, folder: Path) -> None:
    """Raise ConfigError if `record` is in the checkpoint in `folder`, or is something else than a record."""
    from torchtitan_lite.checkpoint.examining.recorded_digests import RecordedDigests

    if record.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"--record-to {record} is in the checkpoint: name a file elsewhere, or use --record")
    try:
        RecordedDigests.read(record, folder)
    except (CheckpointDamaged, CheckpointUnsafe) as error:
        raise ConfigError(
            f"--record-to {record}: expected a record of digests, or no file, found another one ({error.finding}): "
            "name another FILE"
        ) from None
