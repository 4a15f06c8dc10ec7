"""What a checkpoint says about itself.

`manifest.json` is plain JSON: reading it runs nothing and trusts nothing. `Manifest.parse` returns
a manifest whose every field has its type and range, or names the field that has not. Fields that
this version does not know are passed over, so that a later one may add some; a change that an older
reader must not pass over raises `FORMAT_VERSION`.
"""

from __future__ import annotations

import enum
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from torchtitan_lite.errors import CheckpointDamaged, FormatTooNew
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage

FORMAT_VERSION = 1

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

    @property
    def run_id(self) -> str:
        """The run it is of."""
        return self.lineage.run_id


@dataclass(frozen=True)
class FileRecord:
    """What is known of one file."""

    size: int
    """In bytes."""


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
    extra: dict[str, Any] = field(default_factory=dict)
    """JSON values that the store does not look at."""
    format_version: int = FORMAT_VERSION

    @property
    def nbytes(self) -> int:
        """Bytes in all files but the manifest."""
        return sum(record.size for record in self.files.values())

    def to_json(self) -> bytes:
        """The bytes of manifest.json; the same manifest gives the same bytes."""
        document = {
            "format_version": self.format_version,
            "step": self.step,
            "kind": self.kind.value,
            "created_at": float(self.created_at),
            "world_size": self.world_size,
            "versions": dict(self.versions),
            "files": {name: asdict(record) for name, record in sorted(self.files.items())},
            "lineage": self.lineage.to_json(),
            "extra": dict(self.extra),
        }
        return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()

    @classmethod
    def of_folder(cls, folder: Path) -> Manifest | None:
        """The manifest in `folder`; None where there is none. Raises as `parse` does."""
        path = folder / layout.MANIFEST
        return cls.parse(path.read_bytes(), str(path)) if path.is_file() else None

    @classmethod
    def parse(cls, data: bytes, path: str = layout.MANIFEST) -> Manifest:
        """The manifest in `data`. Raises CheckpointDamaged or FormatTooNew, naming `path` and what is wrong."""
        try:
            document = _document(data)
            version = _number(document, "format_version", 1)
            if version <= FORMAT_VERSION:
                return _manifest(document)
        except (ValueError, RecursionError) as error:
            raise CheckpointDamaged(path, str(error)) from None
        raise FormatTooNew(path, version, FORMAT_VERSION)


def _document(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data, parse_constant=_refuse)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise ValueError(f"expected a JSON object, found {_kind(document)}")
    return document


def _manifest(document: dict[str, Any]) -> Manifest:
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
        extra=_value(document, "extra", dict),
    )


def _file(files: dict[str, Any], name: str) -> FileRecord:
    # A checkpoint is a flat folder: a name that could lead out of it is nobody's file.
    if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
        raise ValueError(f"files: {name!r} is not the name of a file")
    return FileRecord(size=_number(_value(files, name, dict), "size", 0))


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
