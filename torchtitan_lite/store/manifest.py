"""What a checkpoint says about itself.

`manifest.json` is plain JSON: reading it runs nothing and trusts nothing. Its last line is the
digest of all that comes before, so that any change is found whatever it makes of the rest.
`Manifest.parse` returns a manifest whose every field has its type and range, or names the field
that has not. Fields that this version does not know are passed over, so that a later one may add
some; a change that an older reader must not pass over raises `FORMAT_VERSION`, and leaves the last
line as it is.
"""

from __future__ import annotations

import enum
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from torchtitan_lite.errors import CheckpointDamaged, FormatTooNew
from torchtitan_lite.store import layout
from torchtitan_lite.store.digest import DIGEST_BYTES, digest_blocks, file_digest, num_blocks, text_digest
from torchtitan_lite.store.lineage import Lineage

FORMAT_VERSION = 3
"""1 had no digests and no table of tensors; until 2 each entry of a table had its path, without types of keys."""

_TABLES = ("tensors", "objects", "structure")
_LAST_LINE = re.compile(rb',\n"digest": "([0-9a-f]{32})"\n}\n')
_LAST_LINE_BYTES = len(',\n"digest": ""\n}\n') + 32

NAN_IN = "nan_in"
"""In `extra`: the keys of weights in which NaN was seen when they were saved; not there if none was."""

T = TypeVar("T")

UNKNOWN = Lineage("unknown")
"""Of a checkpoint whose manifest names no run."""


class CheckpointKind(enum.Enum):
    """What a checkpoint is good for."""

    FULL = "full"
    """Everything that a run needs to go on."""

    WEIGHTS_ONLY = "weights_only"
    """The model alone: never resumed from, never purged."""


@dataclass(frozen=True)
class CheckpointInfo:
    """One committed checkpoint, as it was when it was looked at."""

    step: int
    path: Path
    kind: CheckpointKind
    created_at: float
    """Unix seconds."""
    nbytes: int
    """Of all its files but the manifest."""
    lineage: Lineage = UNKNOWN
    """The run it is of."""
    has_nan: bool = False
    """Whether NaN was seen in its weights when they were saved."""

    @property
    def run_id(self) -> str:
        """The run it is of."""
        return self.lineage.run_id


@dataclass(frozen=True)
class FileRecord:
    """What is known of one file."""

    size: int
    """In bytes."""
    blocks: bytes = b""
    """The digests of its blocks, one after another (store/digest.py); empty if it has none."""

    @classmethod
    def of(cls, data: bytes) -> FileRecord:
        """The record of a file that holds `data`."""
        return cls(len(data), digest_blocks(data))

    @property
    def digest(self) -> str:
        """32 hexadecimal digits: the digest of the file; empty if it has none."""
        return file_digest(self.blocks, self.size) if self.blocks else ""


class Table(Mapping[str, Any]):
    """A JSON object of JSON objects that may be large: its text is made once, and read when it is first looked into."""

    def __init__(self, entries: Mapping[str, Any] | None = None) -> None:
        self._made = dict(entries or {})
        self._path = ""
        self._text: str | None = None

    @classmethod
    def of_text(cls, text: str, path: str) -> Table:
        """The table that `text`, which stands in `path`, is; looking into one that is none raises CheckpointDamaged."""
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

    @property
    def text(self) -> str:
        """As JSON, on one line."""
        if self._text is None:
            self._text = _dump(self._made)
        return self._text

    @property
    def _entries(self) -> dict[str, Any]:
        if not hasattr(self, "_made"):
            try:
                self._made = _checked_table(json.loads(self._text or "", parse_constant=_refuse))
            except (ValueError, RecursionError) as error:
                raise CheckpointDamaged(self._path, str(error)) from None
        return self._made


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint, file by file, and where it comes from."""

    step: int
    kind: CheckpointKind
    created_at: float
    """Unix seconds."""
    world_size: int
    """Ranks that wrote it."""
    versions: dict[str, str]
    """Library name to its version."""
    files: dict[str, FileRecord]
    """File name to its record, for every file in the folder but the manifest."""
    lineage: Lineage = UNKNOWN
    """The run it is of."""
    tensors: Table = field(default_factory=Table)
    """Key to {"dtype", "shape", "chunks": [[file, at, offsets, sizes], ...]}; `at` is the byte in the file
    where the chunk's elements start. Not looked at by the store."""
    objects: Table = field(default_factory=Table)
    """Key to {"value"} or {"item": [file, offset, length]}. Not looked at by the store."""
    structure: Table = field(default_factory=Table)
    """"root" to the tree of containers that the keys of both come from. Not looked at by the store."""
    extra: dict[str, Any] = field(default_factory=dict)
    """JSON values that the store does not look at."""
    format_version: int = FORMAT_VERSION

    @property
    def nbytes(self) -> int:
        """Bytes in all files but the manifest."""
        return sum(record.size for record in self.files.values())

    def to_json(self) -> bytes:
        """The bytes of manifest.json, a line for each field; the same manifest gives the same bytes."""
        lines = {
            "format_version": _dump(self.format_version),
            "step": _dump(self.step),
            "kind": _dump(self.kind.value),
            "created_at": _dump(float(self.created_at)),
            "world_size": _dump(self.world_size),
            "versions": _dump(self.versions),
            "lineage": _dump(self.lineage.to_json()),
            "files": _dump({name: _file_json(record) for name, record in sorted(self.files.items())}),
            "extra": _dump(self.extra),
            "objects": self.objects.text,
            "tensors": self.tensors.text,
            "structure": self.structure.text,
        }
        text = "{\n" + ",\n".join(f'"{name}": {line}' for name, line in lines.items())
        return seal(text.encode())

    @classmethod
    def of_folder(cls, folder: Path) -> Manifest | None:
        """The manifest in `folder`; None where there is none. Raises as `parse` does."""
        path = folder / layout.MANIFEST
        return cls.parse(path.read_bytes(), str(path)) if path.is_file() else None

    @classmethod
    def parse(cls, data: bytes, path: str = layout.MANIFEST) -> Manifest:
        """The manifest in `data`. Raises CheckpointDamaged or FormatTooNew, naming `path` and what is wrong."""
        try:
            sealed = _is_sealed(data)
            document, tables = _document(data, path)
            version = _number(document, "format_version", 1)
            if version > 1 and not sealed:
                raise ValueError("its last line is not its digest")
            if version <= FORMAT_VERSION:
                return _manifest(document, tables)
        except (ValueError, RecursionError) as error:
            raise CheckpointDamaged(path, str(error)) from None
        raise FormatTooNew(path, version, FORMAT_VERSION)


def seal(text: bytes) -> bytes:
    """A manifest whose lines but the last are `text`: as it stands on disk."""
    return text + b',\n"digest": "' + text_digest([text]).encode() + b'"\n}\n'


def _is_sealed(data: bytes) -> bool:
    """Whether `data` has its digest, which is right; raises ValueError if it is wrong."""
    start = max(0, len(data) - _LAST_LINE_BYTES)
    match = _LAST_LINE.fullmatch(data, start)
    if match is not None and text_digest([memoryview(data)[:start]]).encode() != match[1]:
        raise ValueError(f"its own digest is not the {match[1].decode()} of its last line")
    return match is not None


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _file_json(record: FileRecord) -> dict[str, Any]:
    return {"size": record.size, "digest": record.digest, "blocks": record.blocks.hex()}


def _document(data: bytes, path: str) -> tuple[dict[str, Any], dict[str, Table]]:
    """The fields in `data`, and its tables, unread where they stand on lines of their own, as `to_json` writes them."""
    tables = {}
    lines = []
    try:
        for line in data.decode().split("\n"):
            name = next((name for name in _TABLES if line.startswith(f'"{name}": {{') and line.endswith("},")), None)
            if name is None:
                lines.append(line)
            else:
                tables[name] = Table.of_text(line[len(f'"{name}": ') : -1], path)
        document = json.loads("\n".join(lines), parse_constant=_refuse)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise ValueError(f"expected a JSON object, found {_kind(document)}")
    for name in _TABLES:
        if name in document:
            tables[name] = Table(_checked_table(_value(document, name, dict)))
    return document, tables


def _checked_table(entries: Any) -> dict[str, Any]:
    if not isinstance(entries, dict):
        raise ValueError(f"expected a JSON object, found {_kind(entries)}")
    for key, entry in entries.items():
        if type(entry) is not dict:
            raise ValueError(f"{key}: expected dict, found {_kind(entry)}")
    return entries


def _manifest(document: dict[str, Any], tables: dict[str, Table]) -> Manifest:
    versions: dict[str, Any] = _value(document, "versions", dict)
    files: dict[str, Any] = _value(document, "files", dict)
    return Manifest(
        format_version=_number(document, "format_version", 1),
        step=_number(document, "step", 0),
        kind=CheckpointKind(_value(document, "kind", str)),
        created_at=_seconds(document, "created_at"),
        world_size=_number(document, "world_size", 1),
        versions={name: _value(versions, name, str) for name in versions},
        files={name: _file(files, name) for name in files},
        lineage=Lineage.from_json(_value(document, "lineage", dict)),
        tensors=tables.get("tensors", Table()),
        objects=tables.get("objects", Table()),
        structure=tables.get("structure", Table()),
        extra=_value(document, "extra", dict),
    )


def _file(files: dict[str, Any], name: str) -> FileRecord:
    # A checkpoint is a flat folder: a name that could lead out of it is nobody's file.
    if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
        raise ValueError(f"files: {name!r} is not the name of a file")
    record: dict[str, Any] = _value(files, name, dict)
    size = _number(record, "size", 0)
    blocks = bytes.fromhex(_value(record, "blocks", str)) if "blocks" in record else b""
    if blocks and len(blocks) != DIGEST_BYTES * num_blocks(size):
        raise ValueError(f"{name}: expected the digests of {num_blocks(size)} blocks, found {len(blocks)} bytes")
    return FileRecord(size, blocks)


def _number(document: dict[str, Any], name: str, low: int) -> int:
    value = _value(document, name, int)
    if value < low:
        raise ValueError(f"{name}: expected at least {low}, found {value}")
    return value


def _seconds(document: dict[str, Any], name: str) -> float:
    value = _value(document, name, float)
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected seconds, found {value}")
    return value


def _value(document: dict[str, Any], name: str, kind: type[T]) -> T:
    value: object = document.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        found = _kind(value) if name in document else "nothing"
        raise ValueError(f"{name}: expected {kind.__name__}, found {found}")
    return value


def _kind(value: object) -> str:
    return type(value).__name__


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
