"""A manifest with what the records of ranks add to it: for the reader, as if the manifest had all of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from torchtitan_lite.checkpoint.format.structure import decode_structure, encode_structure, merged_structure
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.store.manifest import Manifest, Table
from torchtitan_lite.store.rank_records import RankRecord, RecordsOfRanks


def completed(manifest: Manifest, records: RecordsOfRanks, ranks_files: Iterable[str] | None = None) -> Manifest:
    """Return `manifest` with the entries and digests in the records of the ranks that wrote `ranks_files`.

    None: of all ranks. Raises as `RecordsOfRanks.of`, and `ValueError` where the entries do not fit together.
    """
    having = [name for name in (records.files if ranks_files is None else ranks_files) if records.has(name)]
    if not having:
        return manifest
    found = {name: records.of(name) for name in having}
    blocks = {name: FileRecord(manifest.files[name].size, record.blocks) for name, record in found.items()}
    return with_entries(dataclasses.replace(manifest, files=manifest.files | blocks), [*found.values()])


def with_entries(manifest: Manifest, records: Sequence[RankRecord]) -> Manifest:
    """Return `manifest` with the entries of `records`. Raises ValueError where they do not fit together."""
    return dataclasses.replace(
        manifest,
        objects=joined_tables([manifest.objects, *(record.objects for record in records)]),
        tensors=joined_tables([manifest.tensors, *(record.tensors for record in records)]),
        structure=joined_structures([manifest.structure, *(record.structure for record in records)]),
    )


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
