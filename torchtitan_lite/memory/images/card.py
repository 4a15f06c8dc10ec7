"""The card of an image: what one rank knows of the checkpoint that its image is a file of.

The cards of all ranks hold what a manifest holds, so a start can put one together. The coordinator's has the tables of
tensors and containers, as the text that a manifest holds; each other rank's has only its own file and objects. They
were written by processes that are gone, perhaps by ones that someone else started: what does not fit together is
refused by name.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_lite.checkpoint.reading.folder import joined_structures, joined_tables
from torchtitan_lite.collection import no_collection
from torchtitan_lite.disk.digest import DIGEST_BYTES, FileRecord, num_blocks
from torchtitan_lite.disk.plain_file import opened_plain_file
from torchtitan_lite.errors import CheckpointUnsafe
from torchtitan_lite.store import layout
from torchtitan_lite.store.format_version import FORMAT, check_format, unknown_fields
from torchtitan_lite.store.layout import Listing
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind, Manifest, Table, last_digest
from torchtitan_lite.store.manifest_fields import (
    CONFIG,
    START,
    TOPOLOGY,
    TRAINED_SECONDS,
    file_name,
    integer_field,
    refuse_constant,
    seconds,
    table,
    value_of,
)
from torchtitan_lite.store.place import on_disk
from torchtitan_lite.store.protocol import StoresCheckpoints

_ID_LETTERS = 64


class ImageKey(NamedTuple):
    """The images of one copy of the state of one start, of all ranks; a start may make several copies of a step."""

    step: int
    start: str
    """The id of the start of the job that made them."""
    copy: int
    """Which of the copies that it made."""


@dataclass(frozen=True, kw_only=True)
class CardRun:
    """What the run was, the same on all ranks."""

    folder_id: str
    """The id of the folder of checkpoints."""
    lineage: Lineage
    trained_seconds: float
    """That the run had trained, in all its starts."""
    topology: str
    versions: Mapping[str, str]
    config: Mapping[str, Any]


class CardTables(NamedTuple):
    """What of the manifest's tables a card has."""

    objects: Table
    """The rank's part."""
    tensors: Table | None = None
    """All of it, on the coordinator; with it, or on another rank alone, the entries of its record."""
    structure: Table | None = None


@dataclass(frozen=True, kw_only=True)
class Card:
    """What one rank knows of one image."""

    key: ImageKey
    rank: int
    world_size: int
    run: CardRun
    commits: tuple[Commit, ...]
    """The latest full checkpoints in the folder when the image was staged, as far as its start knew: a few, by step;
    empty for none."""
    created_at: float
    """Unix seconds."""
    file: str
    """The name of the rank's file; empty if it has none."""
    record: FileRecord
    """Size and digests of that file: its bytes are the first ones of the arena."""
    tables: CardTables
    unknown: Mapping[str, Any] = field(default_factory=dict)
    """Fields that a later version added."""

    def to_bytes(self) -> bytes:
        """Return the card as four lines of JSON: fields, objects, tensors, containers."""
        text = json.dumps({**FORMAT, **self.unknown, **self._fields()}, allow_nan=False, separators=(",", ":"))
        return b"\n".join([text.encode(), *Table.texts(*self.tables)])

    def _fields(self) -> dict[str, Any]:
        run, commits = self.run, [dataclasses.asdict(commit) for commit in self.commits]
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            **self.key._asdict(),
            "folder_id": run.folder_id,
            "lineage": run.lineage.to_json(),
            "latest": commits[-1] if commits else None,
            "before": commits[:-1],
            "created_at": float(self.created_at),
            "trained_seconds": float(run.trained_seconds),
            "topology": run.topology,
            "versions": dict(run.versions),
            "config": dict(run.config),
            "file": self.file,
            "size": self.record.size,
            "blocks": self.record.blocks.hex(),
        }

    @classmethod
    def parse(cls, data: bytes) -> Card:
        """Return the card in `data`. Raise FormatTooNew, FormatTooOld, and ValueError that names what is wrong."""
        lines = data.split(b"\n")
        if len(lines) != 4:
            raise ValueError(f"expected 4 lines, found {len(lines)}")
        document = json.loads(lines[0].decode(), parse_constant=refuse_constant)
        if not isinstance(document, dict):
            raise ValueError("its first line is not a JSON object")
        check_format({"format_version": 1} | document, "an in-memory snapshot")
        size, blocks = integer_field(document, "size", 0), bytes.fromhex(value_of(document, "blocks", str))
        if len(blocks) != DIGEST_BYTES * num_blocks(size):
            raise ValueError(f"expected the digests of {num_blocks(size)} blocks, found {len(blocks)} bytes")
        name = value_of(document, "file", str)
        rank, world_size = integer_field(document, "rank", 0), integer_field(document, "world_size", 1)
        if rank >= world_size:
            raise ValueError(f"expected a rank below {world_size}, found {rank}")
        before, latest = value_of(document, "before", list), document.get("latest")
        versions = value_of(document, "versions", dict)
        tensors, structure = (Table.of_text(line, "card") if line else None for line in lines[2:])
        card = cls(
            key=ImageKey(
                integer_field(document, "step", 0), _id(document, "start"), integer_field(document, "copy", 0)
            ),
            rank=rank,
            world_size=world_size,
            run=CardRun(
                folder_id=_id(document, "folder_id"),
                lineage=Lineage.from_json(value_of(document, "lineage", dict)),
                trained_seconds=max(0.0, seconds(document, "trained_seconds")),
                topology=value_of(document, "topology", str),
                versions={each: value_of(versions, each, str) for each in versions},
                config=value_of(document, "config", dict),
            ),
            commits=tuple(map(_commit, [*before[-MOST_COMMITS:], *([] if latest is None else [latest])])),
            created_at=value_of(document, "created_at", float),
            file=file_name(name) if name else "",
            record=FileRecord(size, blocks),
            tables=CardTables(Table.of_text(lines[1], "card"), tensors, structure),
        )
        return dataclasses.replace(card, unknown=unknown_fields(document, {*card._fields()}))


def _commit(value: Any) -> Commit:
    document = table({"commit": value})["commit"]
    digest = value_of(document, "digest", str)[:_ID_LETTERS]
    return Commit(
        integer_field(document, "step", 0), digest, integer_field(document, "written_ns", 0), _id(document, "run_id")
    )


def _id(document: dict[str, Any], name: str) -> str:
    value = value_of(document, name, str)
    if len(value) > _ID_LETTERS or not value.isascii():
        raise ValueError(f"{name}: expected at most {_ID_LETTERS} letters, found {value!r:.80}")
    return value


# The checkpoints on disk as images know them: which one was committed last, and whether a damaged one is that one.
#
# An image belongs to the run on disk only if nothing was committed since that it does not know. A damaged checkpoint
# has lost a part of itself, so it is known by what is left: the last line of its manifest, or the time of rank 0's
# file, which no process writes after the commit.


MOST_COMMITS = 4
"""How many an image knows: the latest one, and the ones that are the latest where those after them are damaged."""


@dataclass(frozen=True)
class Commit:
    """A committed checkpoint, as an image knows it; two are the same if their manifests are."""

    step: int
    digest: str
    """The digest in the last line of its manifest; empty where that is damaged."""
    written_ns: int = field(default=0, compare=False)
    """When the file of rank 0 was written, in nanoseconds; 0 if that is unknown."""
    run_id: str = field(default="", compare=False)
    """That of its run or branch; empty if that is unknown."""

    def is_rest_of(self, commit: Commit) -> bool:
        """Return whether this, which was found in a damaged checkpoint, is left of `commit`."""
        has_digest = bool(self.digest) and self.digest == commit.digest
        has_time = self.written_ns > 0 and self.written_ns == commit.written_ns
        return self.step == commit.step and (has_digest or has_time)


def commit_of(info: CheckpointInfo) -> Commit | None:
    """Return the step and the digest of a committed checkpoint; None if its manifest cannot be read."""
    folder = on_disk(info.path)
    try:
        return Commit(info.step, _digest_in(folder), _written_ns(folder), info.run_id)
    except (OSError, CheckpointUnsafe):
        return None


def commits_in(store: StoresCheckpoints) -> tuple[Commit, ...]:
    """Return the latest full checkpoints of `store`, by ascending step, at most `MOST_COMMITS`."""
    full = [info for info in store.committed() if info.kind is CheckpointKind.FULL]
    return tuple(commit for info in full[-MOST_COMMITS:] if (commit := commit_of(info)) is not None)


def rests_in(store: StoresCheckpoints) -> frozenset[Commit]:
    """Return what is left of the damaged checkpoints in `store`, those that were set aside included."""
    root = Path(store.address)
    folders = [(step, Path(error.path)) for step, error in store.damaged().items()]
    for name in Listing(root).names:
        if (aside := layout.parse_set_aside(name)) is not None and aside[1] == "corrupt":
            folders.append((aside[0], root / name))
    found = set()
    for step, folder in folders:
        digest = ""
        with suppress(OSError, CheckpointUnsafe):
            digest = _digest_in(folder)
        found.add(Commit(step, digest, _written_ns(folder)))
    return frozenset(found)


def _digest_in(folder: Path) -> str:
    with opened_plain_file(folder / layout.MANIFEST) as fd:
        return last_digest(fd)


def _written_ns(folder: Path) -> int:
    try:
        return os.lstat(folder / layout.data_file(0, 0)).st_mtime_ns
    except OSError:
        return 0


def assembled_manifest(cards: Sequence[Card]) -> Manifest:
    """Return the manifest of the checkpoint whose images the `cards` describe. Raise ValueError if they do not fit.

    It has no `.metadata` among its files, and no digests of tensors.
    """
    by_rank = sorted(cards, key=lambda card: card.rank)
    if not by_rank:
        raise ValueError("there are no headers")
    first = by_rank[0]
    if [card.rank for card in by_rank] != [*range(first.world_size)]:
        found = ", ".join(str(card.rank) for card in by_rank)
        raise ValueError(f"expected the headers of ranks 0 to {first.world_size - 1}, found those of {found:.200}")
    for card in by_rank:
        _check_same_step(card, first)
    if first.tables.tensors is None or not first.tables.structure:
        raise ValueError("the header of rank 0 has no tables of tensors and containers")
    having = [card.tables for card in by_rank]
    return Manifest(
        step=first.key.step,
        kind=CheckpointKind.FULL,
        created_at=first.created_at,
        world_size=first.world_size,
        versions=dict(first.run.versions),
        files={card.file: card.record for card in by_rank if card.file},
        lineage=first.run.lineage,
        tensors=joined_tables([tables.tensors for tables in having if tables.tensors is not None]),
        objects=_objects_of_ranks(by_rank),
        structure=joined_structures([tables.structure for tables in having if tables.structure is not None]),
        extra={
            TOPOLOGY: first.run.topology,
            CONFIG: dict(first.run.config),
            START: first.key.start,
            TRAINED_SECONDS: first.run.trained_seconds,
        },
    )


def same_contents(on_disk: Manifest, in_memory: Manifest) -> bool:
    """Return whether both, completed, describe the same checkpoint, byte by byte."""
    files = {name: record for name, record in on_disk.files.items() if layout.is_data_file(name)}
    # Only on disk a value may come with its item, for a `.metadata` that is added later.
    objects = {key: {"value": entry["value"]} if "value" in entry else entry for key, entry in on_disk.objects.items()}
    is_same = files == in_memory.files and objects == dict(in_memory.objects)
    return is_same and dict(on_disk.tensors) == dict(in_memory.tensors)


def _objects_of_ranks(by_rank: Sequence[Card]) -> Table:
    """Return the objects of all cards in one table. Raise ValueError if two ranks have the same one.

    There may be a million. Their text is put together as it is, and parsed only to find those that are there twice.
    """
    having = [card for card in by_rank if card.tables.objects]
    if len(having) < 2:
        return having[0].tables.objects if having else Table()
    keys: set[str] = set()
    for card in having:
        with no_collection():
            own = set(card.tables.objects)
        if not keys.isdisjoint(own):
            raise ValueError(f"rank {card.rank}: {min(keys & own)!r:.100} is an object of another rank, too")
        keys |= own
    inside = (card.tables.objects.text.strip()[1:-1] for card in having)
    return Table.of_text(b"{" + b",".join(inside) + b"}", "card")


def _check_same_step(card: Card, first: Card) -> None:
    """Raise ValueError unless `card` is of the same step of the same start as `first`, the card of rank 0."""
    run, of_first = card.run, first.run
    for name, found, expected in (
        *zip(card.key._fields, card.key, first.key, strict=True),
        ("world_size", card.world_size, first.world_size),
        ("folder_id", run.folder_id, of_first.folder_id),
        ("topology", run.topology, of_first.topology),
    ):
        if found != expected:
            raise ValueError(f"rank {card.rank}: {name}: expected {expected!r:.80}, found {found!r:.80}")
    lineage, of_first_rank = run.lineage, of_first.lineage
    if (lineage.run_id, lineage.branch_point) != (of_first_rank.run_id, of_first_rank.branch_point):
        raise ValueError(f"rank {card.rank}: it is of run {lineage.run_id}, rank 0 of {of_first_rank.run_id}")
    if card.file and layout.rank_of(card.file) != card.rank:
        raise ValueError(f"rank {card.rank}: {card.file!r:.80} is not the name of its file")
    if not card.file and card.record.size:
        raise ValueError(f"rank {card.rank}: its file of {card.record.size} bytes has no name")
