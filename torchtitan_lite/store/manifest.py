"""The manifest: what a checkpoint says about itself.

`manifest.json` is plain JSON: reading it runs nothing. Its last line is the digest of everything before it, so any
change is found. `Manifest.parse` returns a manifest whose every field has its type and range, or names the wrong field.
It has one form for any number of ranks. Unknown fields are ignored and kept, so that a later version may add
some; every version leaves the form of the last line as it is.
"""

from __future__ import annotations

import enum
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any

from torchtitan_lite.disk.digest import DIGEST_BYTES, FileRecord, num_blocks, text_digest
from torchtitan_lite.errors import CheckpointDamaged, SaveFailed
from torchtitan_lite.store import layout
from torchtitan_lite.store.described import allowed_description_bytes, read_description
from torchtitan_lite.store.files_of_ranks import Files, FilesOfRanks, in_columns, recorded_sizes, with_rank_files
from torchtitan_lite.store.format_version import FORMAT, FORMAT_VERSION, check_format, unknown_fields
from torchtitan_lite.store.lineage import MAX_ABANDONED, Lineage
from torchtitan_lite.store.manifest_fields import (
    extra,
    file_name,
    integer_field,
    json_type,
    refuse_constant,
    seconds,
    table,
    value_of,
)
from torchtitan_lite.store.place import Place

_TABLES = ("tensors", "objects", "structure")
_FIELDS = frozenset(
    {*("step", "kind", "created_at", "world_size", "versions", "lineage", "files", "files_of_ranks"), *_TABLES}
    | {"extra", "digest"}
)
_LAST_LINE = re.compile(rb',\n"digest": "([0-9a-f]{32})"\n}\n')
_LAST_LINE_BYTES = len(',\n"digest": ""\n}\n') + 32

_ENDING = b'"\n}\n'

UNKNOWN = Lineage("unknown")
"""The lineage of a checkpoint whose manifest names no run."""


class CheckpointKind(enum.Enum):
    """What a checkpoint can be used for."""

    FULL = "full"
    """Everything that a run needs to resume."""

    WEIGHTS_ONLY = "weights_only"
    """Only the model: no run resumes from it, no policy purges it."""


@dataclass(frozen=True)
class CheckpointInfo:
    """One committed checkpoint, as it was when its manifest was read."""

    step: int
    path: Place
    kind: CheckpointKind
    created_at: float
    """Unix seconds."""
    nbytes: int
    """Bytes of all its files but the manifest."""
    lineage: Lineage = UNKNOWN
    """Its run and branch."""
    has_nan: bool = False
    """Whether NaN was found in its weights or optimizer states when they were saved."""
    ranks_differ: bool = False
    """Whether ranks were seen to hold different values of a tensor when it was saved."""
    never_finite: tuple[str, ...] = ()
    """The keys of optimizer states that were not finite at its run's first save, nor at this one."""
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    """What its run measured at this step, all finite."""

    @property
    def run_id(self) -> str:
        """Return the id of its run."""
        return self.lineage.run_id

    @property
    def is_good(self) -> bool:
        """Return whether nothing was found wrong with the state when it was saved."""
        return not (self.has_nan or self.ranks_differ)


def of_equal_ranks(committed: Sequence[CheckpointInfo]) -> Sequence[CheckpointInfo]:
    """Return those of `committed` whose ranks were equal when they were saved; all, if no full one is among these.

    A start takes the latest of them: what the others hold may be wrong.
    """
    equal = [info for info in committed if not info.ranks_differ]
    return equal if any(info.kind is CheckpointKind.FULL for info in equal) else committed


def without_abandoned(committed: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """Return the checkpoints of `committed` that no other one abandons."""
    abandoned = {pair for info in committed if info.lineage.abandons for pair in info.lineage.abandons}
    return [info for info in committed if not abandoned or (info.step, info.run_id) not in abandoned]


def abandoned_by(
    run_id: str, branch_point: int | None, committed: Iterable[CheckpointInfo]
) -> tuple[tuple[int, str], ...]:
    """Return what a commit of this run abandons: all steps of other runs beyond the branch point."""
    if branch_point is None:
        return ()
    others = (info for info in committed if info.run_id != run_id)
    return tuple((info.step, info.run_id) for info in others if info.step > branch_point)


class Table(Mapping[str, Any]):
    """A JSON object of JSON objects, possibly large: encoded at most once, and parsed on the first access."""

    def __init__(self, entries: Mapping[str, Any] | None = None) -> None:
        self._made = dict(entries or {})
        self._path = ""
        self._text: bytes | None = None

    @classmethod
    def of_text(cls, text: bytes, path: str) -> Table:
        """Return the table with the JSON text `text`, from the file `path`.

        The first access raises CheckpointDamaged if the text is no table.
        """
        table = cls()
        table._text, table._path = text, path
        del table._made
        return table

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        # Without parsing: an object with an entry has more than brackets.
        return bool(self._made) if hasattr(self, "_made") else bool((self._text or b"").strip(b"{} \t\r"))

    @property
    def unparsed(self) -> bytes | None:
        """Return the JSON text as long as it was not parsed; None after that, and for a table that was not read."""
        return None if hasattr(self, "_made") else self._text

    @property
    def text(self) -> bytes:
        """Return the JSON text, on one line."""
        if self._text is None:
            self._text = compact_json(self._made).encode()
        return self._text

    @staticmethod
    def texts(*tables: Table | None) -> list[bytes]:
        """Return the JSON text of each of `tables`; empty for None."""
        return [b"" if each is None else each.text for each in tables]

    @property
    def _entries(self) -> dict[str, Any]:
        if not hasattr(self, "_made"):
            try:
                self._made = table(json.loads(self._text or b"", parse_constant=refuse_constant))
            except (ValueError, RecursionError) as error:
                raise damage_to(self._path, error) from None
        return self._made


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint, file by file, and its origin."""

    step: int
    kind: CheckpointKind
    created_at: float
    """Unix seconds."""
    world_size: int
    """Number of ranks that wrote it."""
    versions: dict[str, str]
    """Version of each library, by name."""
    files: Files
    """The record of every file in the folder but the manifest, by name."""
    lineage: Lineage = UNKNOWN
    """Its run and branch."""
    tensors: Table = field(default_factory=Table)
    """Key to {"dtype", "shape", "chunks": [[file, at, offsets, sizes], ...]}; `at` is the byte in the file where the
    elements of the chunk start. In place of the chunks there may be "runs", [[count, [rank, step], at, dim, offsets,
    sizes], ...]. The store does not look into it."""
    objects: Table = field(default_factory=Table)
    """Key to {"value"} or {"item": [file, offset, length]}. The store does not look into it."""
    structure: Table = field(default_factory=Table)
    """"root" to the tree of containers of the keys of both tables. The store does not look into it."""
    extra: dict[str, Any] = field(default_factory=dict)
    """JSON values, by the names in `manifest_fields`."""
    unknown: Mapping[str, Any] = field(default_factory=dict)
    """Fields that a later version added, as they are in the file."""

    @property
    def format_version(self) -> int:
        """Return the version that wrote it."""
        return int(self.unknown.get("format_version", FORMAT_VERSION))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all files but the manifest."""
        return sum(recorded_sizes(self.files).values())

    def to_json(self) -> bytes:
        """Return the contents of manifest.json, a line for each field; equal manifests give equal bytes."""
        files, of_ranks = in_columns(self.files)
        lines = {
            **{name: compact_json(value) for name, value in {**FORMAT, **self.unknown}.items()},
            "step": compact_json(self.step),
            "kind": compact_json(self.kind.value),
            "created_at": compact_json(float(self.created_at)),
            "world_size": compact_json(self.world_size),
            "versions": compact_json(self.versions),
            "lineage": compact_json(self.lineage.to_json()),
            "files": f"{{{','.join(_file_json(name, record) for name, record in sorted(files.items()))}}}",
            "files_of_ranks": of_ranks.to_json(),
            "extra": compact_json(self.extra),
        }
        tables = {"objects": self.objects, "tensors": self.tensors, "structure": self.structure}
        encoded = [f'"{name}": {line}'.encode() for name, line in lines.items()]
        encoded += [f'"{name}": '.encode() + entries.text for name, entries in tables.items()]
        return seal(b"{\n" + b",\n".join(encoded))

    def to_readable_json(self) -> bytes:
        """Return the same as `to_json`. Raise SaveFailed if readers would refuse it."""
        text = self.to_json()
        data_bytes = self.nbytes - (self.files[layout.METADATA].size if layout.METADATA in self.files else 0)
        if len(text) > (most := allowed_description_bytes(data_bytes)):
            raise SaveFailed(
                self.step,
                f"{layout.MANIFEST} would have {len(text)} bytes, and for {data_bytes} bytes of data it may have "
                f"{most}; give the state fewer or larger entries",
            )
        if len(self.lineage.abandons) > MAX_ABANDONED:
            raise SaveFailed(
                self.step,
                f"it would abandon {len(self.lineage.abandons)} checkpoints, and at most {MAX_ABANDONED} are "
                "allowed; remove some, or start in another --job.dump_folder",
            )
        return text

    @classmethod
    def of_folder(cls, folder: Path) -> Manifest | None:
        """Return the manifest in `folder`; None if there is none.

        Raises as `parse` does, `CheckpointUnsafe` if it is no regular file or too large, and OSError.
        """
        path = folder / layout.MANIFEST
        try:
            return cls.parse(read_description(path, _ENDING), str(path))
        except (FileNotFoundError, NotADirectoryError):
            return None

    @classmethod
    def parse(cls, data: bytes, path: str = layout.MANIFEST, name_of: Callable[[str], str] = file_name) -> Manifest:
        """Return the manifest in `data`; `name_of` returns the name of a file, or raises ValueError for a wrong one.

        Raises CheckpointDamaged, FormatTooNew or FormatTooOld, with `path` and what is wrong.
        """
        try:
            digest = last_digest_of(data)
            if digest and not has_digest(data, digest):
                raise ValueError(f"its own digest is not the {digest} of its last line")
            document, tables = _fields_and_tables(data, path)
            check_format(document, path)  # First: version 1 had no digest.
            if not digest:
                raise ValueError("its last line is not its digest")
            return _manifest_from_json(document, tables, name_of)
        except (ValueError, RecursionError) as error:
            raise damage_to(path, error) from None


def damage_to(path: str, error: Exception) -> CheckpointDamaged:
    """Return `error`, about the file `path` of a checkpoint, as damage of that checkpoint."""
    folder, _, name = path.rpartition("/")  # Not pathlib, which makes s3:/ of s3://.
    return CheckpointDamaged(folder or ".", f"{name}: {error}")


def last_digest(fd: int) -> str:
    """Return the digest in the last line of the manifest that is open as `fd`; the empty string if it has none."""
    return last_digest_of(os.pread(fd, _LAST_LINE_BYTES, max(0, os.fstat(fd).st_size - _LAST_LINE_BYTES)))


def last_digest_of(data: bytes) -> str:
    """Return the digest in the last line of the manifest `data`; the empty string if it has none."""
    match = _LAST_LINE.fullmatch(data, max(0, len(data) - _LAST_LINE_BYTES))
    return match[1].decode() if match is not None else ""


def has_digest(data: bytes, digest: str) -> bool:
    """Return whether `data` is the manifest whose last line has `digest`: no other manifest has the same."""
    return last_digest_of(data) == digest == text_digest([memoryview(data)[:-_LAST_LINE_BYTES]])


def seal(text: bytes) -> bytes:
    """Return `text`, the manifest without its last line, with its digest as the last line."""
    return text + b',\n"digest": "' + text_digest([text]).encode() + b'"\n}\n'


def compact_json(value: Any) -> str:
    """Return `value` as JSON without blanks. Raise ValueError for NaN and the infinities."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _file_json(name: str, record: FileRecord) -> str:
    name = encode_basestring_ascii(name)
    return f'{name}:{{"size":{record.size},"blocks":"{record.blocks.hex()}"}}'


def _fields_and_tables(data: bytes, path: str) -> tuple[dict[str, Any], dict[str, Table]]:
    """Return the fields in `data`, and its tables.

    A table on a line of its own, as `to_json` writes it, is not parsed.
    """
    tables: dict[str, Table] = {}
    lines = []
    begin = 0
    # Line by line: the tables are nearly all of the data, and must not be in memory three times.
    while begin < len(data):
        end = data.find(b"\n", begin)
        end = len(data) if end < 0 else end
        name = next((name for name in _TABLES if data.startswith(b'"%s": {' % name.encode(), begin, end)), None)
        if name is None or not data.endswith(b"},", begin, end):
            lines.append(data[begin:end])
        else:
            tables[name] = Table.of_text(data[begin + len(f'"{name}": ') : end - 1], path)
        begin = end + 1
    try:
        document = json.loads(b"\n".join(lines).decode(), parse_constant=refuse_constant)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise ValueError(f"expected a JSON object, found {json_type(document)}")
    for name in _TABLES:
        if name in document:
            tables[name] = Table(table(value_of(document, name, dict)))
    return document, tables


def _manifest_from_json(document: dict[str, Any], tables: dict[str, Table], name_of: Callable[[str], str]) -> Manifest:
    versions: dict[str, Any] = value_of(document, "versions", dict)
    return Manifest(
        step=integer_field(document, "step", 0),
        kind=CheckpointKind(value_of(document, "kind", str)),
        created_at=seconds(document, "created_at"),
        world_size=integer_field(document, "world_size", 1),
        versions={name: value_of(versions, name, str) for name in versions},
        files=_files(document, name_of),
        lineage=Lineage.from_json(value_of(document, "lineage", dict)),
        tensors=_named_table(tables, "tensors"),
        objects=_named_table(tables, "objects"),
        structure=_named_table(tables, "structure"),
        extra=extra(document),
        unknown=unknown_fields(document, _FIELDS),
    )


def _named_table(tables: dict[str, Table], name: str) -> Table:
    if name not in tables:
        raise ValueError(f"{name}: expected dict, found nothing")
    return tables[name]


def _files(document: dict[str, Any], name_of: Callable[[str], str]) -> Files:
    listed: dict[str, Any] = value_of(document, "files", dict)
    files = {name_of(name): _file(listed, name) for name in listed}
    of_ranks = FilesOfRanks.from_json(value_of(document, "files_of_ranks", dict))
    if twice := [name for name in files if name in of_ranks]:
        raise ValueError(f"files: {twice[0]} is in files_of_ranks, too")
    return with_rank_files(files, of_ranks) if of_ranks.have_records else files | dict(of_ranks)


def _file(files: dict[str, Any], name: str) -> FileRecord:
    record: dict[str, Any] = value_of(files, name, dict)
    size = integer_field(record, "size", 0)
    blocks = bytes.fromhex(value_of(record, "blocks", str)) if "blocks" in record else b""
    if blocks and len(blocks) != DIGEST_BYTES * num_blocks(size):
        raise ValueError(f"{name}: expected the digests of {num_blocks(size)} blocks, found {len(blocks)} bytes")
    return FileRecord(size, blocks)
