"""A checkpoint's folder, opened for reading.

It supplies everything that is known before data is read: the manifest, if there is one; the contents and
their places; the sizes of the files, compared with those that the commit recorded. Each is read and
checked at its first use, and nothing outside the folder is read. Its files may be elsewhere than on disk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.checkpoint.format.structure import decode_structure, encode_structure, merged_structure
from torchtitan_lite.checkpoint.reading.files import Files, files_of
from torchtitan_lite.checkpoint.untrusted.safe_metadata import read_metadata
from torchtitan_lite.collection import no_collection
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.errors import CheckpointDamaged, reading
from torchtitan_lite.store import layout
from torchtitan_lite.store.files_of_ranks import recorded_sizes
from torchtitan_lite.store.manifest import Manifest, Table
from torchtitan_lite.store.place import Place, on_disk
from torchtitan_lite.store.rank_records import RankRecord, RecordsOfRanks

Verify = Literal["off", "size", "full", "full_alone"]
"""What a load compares with the manifest: nothing; the files' sizes; these and every byte that it reads. `full_alone`:
the same, and no rank takes bytes that another one has read."""


class CheckpointFolder:
    """The checkpoint at `path`, ours or plain DCP's. Raises `CheckpointUnreadable` if the system refuses a read.

    `dtypes` are those of its contents, by name: torch's by default, which is the only use of torch here. Its files are
    `files` if they are given, and `path` is then only its name. Of the files whose sizes the commit recorded, rank
    `rank` of `world_size` looks only at its share: thousands of ranks, with a file each, would otherwise ask the
    file system for millions of sizes. All ranks open the checkpoint, and raise together what one of them finds.
    Of the entries in the records of ranks it has those of `record_of`; None: all.
    """

    def __init__(
        self,
        path: Place,
        verify: Verify = "full",
        dtypes: Mapping[str, Any] | None = None,
        files: Files | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        record_of: int | None = None,
    ) -> None:
        self.path = path
        self.files: Files = files_of(path) if files is None else files
        self.verify: Verify = verify
        self._rank, self._world_size = rank, world_size
        self._record_of = record_of
        self._dtypes = _dtypes_of_torch() if dtypes is None else dtypes

    @cached_property
    def manifest(self) -> Manifest | None:
        """Our manifest, with what is in the records of ranks; None in a checkpoint of plain DCP.

        Raises `CheckpointDamaged`, `CheckpointUnsafe`, `FormatTooNew` or `FormatTooOld`.
        """
        if self.manifest_alone is None or self._rank_records is None:
            return None
        rank_files = None if self._record_of is None else [layout.data_file(self._record_of, 0)]
        return complete(self.manifest_alone, self._rank_records, self.path, rank_files)

    @cached_property
    def own_keys(self) -> frozenset[str]:
        """The keys that other ranks do not have, because they are in the record of this one."""
        if self._record_of is None or self._rank_records is None:
            return frozenset()
        file = layout.data_file(self._record_of, 0)
        if not self._rank_records.has(file):
            return frozenset()
        record = self._rank_records.of(file)
        return frozenset([*record.tensors, *record.objects])

    @cached_property
    def _rank_records(self) -> RecordsOfRanks | None:
        manifest = self.manifest_alone
        return None if manifest is None else records_of(self.files, self.path, manifest)

    @cached_property
    def manifest_alone(self) -> Manifest | None:
        """The same without the records, which are not read."""
        with no_collection(), reading(f"{self.path}/{layout.MANIFEST}"):
            return self.files.manifest()

    @cached_property
    def contents_alone(self) -> Contents:
        """The contents that the manifest without the records has, unchecked. Raises as `manifest_alone`."""
        assert self.manifest_alone is not None, "only a checkpoint of ours has them"
        return Contents.of_manifest(self.manifest_alone, str(self.path), self._dtypes)

    @cached_property
    @no_collection()
    def contents(self) -> Contents:
        """The contents, after all checks. Raises `CheckpointDamaged` or `CheckpointUnsafe` if one of them fails."""
        with reading(self.path):
            contents = self._contents()
            contents.check_names()
            recorded = recorded_sizes(self.manifest.files) if self.manifest is not None else {}
            share = {*self.files.share(sorted(recorded), self._rank, self._world_size)}
            found = self.files.sizes_of(share | (contents.files - recorded.keys()))
        if self.verify != "off":
            for name in share:
                if name not in found:
                    raise CheckpointDamaged(str(self.path), f"{name} is missing")
                if found[name] != recorded[name]:
                    finding = f"{name}: expected {recorded[name]} bytes, found {found[name]}"
                    raise CheckpointDamaged(str(self.path), finding)
        sizes = recorded | found
        for name in share - found.keys():
            del sizes[name]
        contents.check(sizes)
        return contents

    @cached_property
    def records(self) -> Mapping[str, FileRecord]:
        """The recorded size and digests of each file; empty unless every byte is verified."""
        if self.verify in ("off", "size") or self._rank_records is None:
            return {}
        return self._rank_records

    def _contents(self) -> Contents:
        if self.manifest is None:
            return read_metadata(on_disk(self.path), self._dtypes)
        return Contents.of_manifest(self.manifest, str(self.path), self._dtypes)


def _dtypes_of_torch() -> Mapping[str, Any]:
    from torchtitan_lite.checkpoint.format.torch_contents import DTYPES

    return DTYPES


# The manifest of a checkpoint together with the records of its ranks, read from its files.


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
    having = [name for name in (records.files if rank_files is None else rank_files) if records.has(name)]
    if not having:
        return manifest
    try:
        found = {name: records.of(name) for name in having}
        blocks = {name: FileRecord(manifest.files[name].size, record.blocks) for name, record in found.items()}
        of_all: list[Manifest | RankRecord] = [manifest, *found.values()]
        return dataclasses.replace(
            manifest,
            files=manifest.files | blocks,
            objects=joined_tables([each.objects for each in of_all]),
            tensors=joined_tables([each.tensors for each in of_all]),
            structure=joined_structures([each.structure for each in of_all]),
        )
    except CheckpointDamaged:
        raise
    except ValueError as error:
        raise CheckpointDamaged(str(folder), f"the records of its ranks do not fit together: {error}") from None


def joined_tables(tables: Sequence[Table]) -> Table:
    """Return the entries of all `tables`, which have different keys, without parsing one."""
    having = [each for each in tables if each]
    if len(having) < 2:
        return having[0] if having else Table()
    return Table.of_text(b"{" + b",".join(each.text.strip()[1:-1] for each in having) + b"}", "")


def joined_structures(tables: Sequence[Table]) -> Table:
    """Return the containers of all `tables` in one. Raises ValueError where they do not fit together."""
    having = [each for each in tables if each]
    if len(having) < 2:
        return having[0] if having else Table()
    return Table({"root": encode_structure(merged_structure(decode_structure(each["root"]) for each in having)[0])})


def records_of(files: Files, folder: Place, manifest: Manifest) -> RecordsOfRanks:
    """Return the records of the ranks that wrote the checkpoint in `folder`; reads nothing yet."""
    return RecordsOfRanks(manifest, str(folder), files.reader(), files.path_of, files.sizes_of)
