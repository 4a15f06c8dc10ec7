"""The card of an image: what one rank knows of the checkpoint that its image is a file of.

The cards of all ranks hold what a manifest holds, so a start can put one together. The coordinator's has the tables of
tensors and containers, as the text that a manifest holds; each other rank's has only its own file and objects.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan_lite.checkpoint.images.commits import MOST_COMMITS, Commit
from torchtitan_lite.disk.digest import DIGEST_BYTES, FileRecord, num_blocks
from torchtitan_lite.store.format_version import FORMAT, check_format, unknown_fields
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import Table
from torchtitan_lite.store.manifest_fields import file_name, number, refuse_constant, seconds, table, value_of

_ID_LETTERS = 64


@dataclass(frozen=True, kw_only=True)
class Card:
    """What one rank knows of one image."""

    rank: int
    world_size: int
    step: int
    start: str
    """The id of the start of the job that staged it; the same on all of its ranks."""
    folder_id: str
    """The id of the folder of checkpoints."""
    lineage: Lineage
    copy: int = 0
    """Which copy of a state this is, among all that the start staged; the same on all of its ranks."""
    latest: Commit | None
    """The latest full checkpoint in the folder when the image was staged, as far as that start knew; None for none."""
    before: tuple[Commit, ...] = ()
    """The full checkpoints before that one, by ascending step; a few."""
    created_at: float
    """Unix seconds."""
    trained_seconds: float = 0.0
    """That the run had trained, in all its starts."""
    topology: str
    versions: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    file: str
    """The name of the rank's file; empty if it has none."""
    record: FileRecord
    """Size and digests of that file: its bytes are the first ones of the arena."""
    objects: Table
    """The rank's part of the manifest's table."""
    tensors: Table | None = None
    """The manifest's tables, on the coordinator; with them, or on another rank alone, the entries of its record."""
    structure: Table | None = None
    unknown: Mapping[str, Any] = field(default_factory=dict)
    """Fields that a later version added."""

    def to_bytes(self) -> bytes:
        """Return the card as four lines of JSON: fields, objects, tensors, containers."""
        lineage, tables = self.lineage.to_json(), Table.texts(self.objects, self.tensors, self.structure)
        fields = {
            **FORMAT,
            **self.unknown,
            "rank": self.rank,
            "world_size": self.world_size,
            "step": self.step,
            "copy": self.copy,
            "start": self.start,
            "folder_id": self.folder_id,
            "lineage": lineage,
            "latest": None if self.latest is None else dataclasses.asdict(self.latest),
            "before": [dataclasses.asdict(commit) for commit in self.before],
            "created_at": float(self.created_at),
            "trained_seconds": float(self.trained_seconds),
            "topology": self.topology,
            "versions": dict(self.versions),
            "config": dict(self.config),
            "file": self.file,
            "size": self.record.size,
            "blocks": self.record.blocks.hex(),
        }
        text = json.dumps(fields, allow_nan=False, separators=(",", ":"))
        return b"\n".join([text.encode(), *tables])

    @classmethod
    def parse(cls, data: bytes) -> Card:
        """Return the card in `data`. Raise FormatTooNew, FormatTooOld, and ValueError that names what is wrong."""
        lines = data.split(b"\n")
        if len(lines) != 4:
            raise ValueError(f"expected 4 lines, found {len(lines)}")
        document = json.loads(lines[0].decode(), parse_constant=refuse_constant)
        if not isinstance(document, dict):
            raise ValueError("its first line is not a JSON object")
        check_format({"format_version": 1} | document, "an image in memory")
        size, blocks = number(document, "size", 0), bytes.fromhex(value_of(document, "blocks", str))
        if len(blocks) != DIGEST_BYTES * num_blocks(size):
            raise ValueError(f"expected the digests of {num_blocks(size)} blocks, found {len(blocks)} bytes")
        name = value_of(document, "file", str)
        latest = document.get("latest")
        rank, world_size = number(document, "rank", 0), number(document, "world_size", 1)
        if rank >= world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        before = value_of(document, "before", list)
        versions = value_of(document, "versions", dict)
        return cls(
            rank=rank,
            world_size=world_size,
            step=number(document, "step", 0),
            copy=number(document, "copy", 0),
            start=_id(document, "start"),
            folder_id=_id(document, "folder_id"),
            lineage=Lineage.from_json(value_of(document, "lineage", dict)),
            latest=None if latest is None else _commit(latest),
            before=tuple(map(_commit, before[-MOST_COMMITS:])),
            created_at=value_of(document, "created_at", float),
            trained_seconds=max(0.0, seconds(document, "trained_seconds")),
            topology=value_of(document, "topology", str),
            versions={each: value_of(versions, each, str) for each in versions},
            config=value_of(document, "config", dict),
            file=file_name(name) if name else "",
            record=FileRecord(size, blocks),
            objects=Table.of_text(lines[1], "card"),
            tensors=Table.of_text(lines[2], "card") if lines[2] else None,
            structure=Table.of_text(lines[3], "card") if lines[3] else None,
            unknown=unknown_fields(document, {*cls.__dataclass_fields__, "size", "blocks"}),
        )


def _commit(value: Any) -> Commit:
    document = table({"commit": value})["commit"]
    digest = value_of(document, "digest", str)[:_ID_LETTERS]
    return Commit(number(document, "step", 0), digest, number(document, "written_ns", 0), _id(document, "run_id"))


def _id(document: dict[str, Any], name: str) -> str:
    value = value_of(document, name, str)
    if len(value) > _ID_LETTERS or not value.isascii():
        raise ValueError(f"{name}: expected at most {_ID_LETTERS} letters, found {value!r:.80}")
    return value
