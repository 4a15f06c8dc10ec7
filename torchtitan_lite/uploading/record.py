"""What has been uploaded from a folder of checkpoints, and how far: for the next start, for `ls` and for people.

One file in the folder, next to the checkpoints, with a record of each other folder. What is there is decided there: an
entry only says when it was last seen. Only the process that uploads there writes a record. Whatever the file holds,
reading it yields values of the right types, or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_lite.disk.durable import DISK
from torchtitan_lite.disk.lock_file import locked
from torchtitan_lite.disk.plain_file import read_plain
from torchtitan_lite.errors import CheckpointUnsafe
from torchtitan_lite.store import layout
from torchtitan_lite.store.format_version import FORMAT, check_format, unknown_fields
from torchtitan_lite.store.manifest_fields import file_name, integer_field, json_bytes, json_object, seconds, value_of
from torchtitan_lite.uploading.choice import Save

_MOST_BYTES = 16 << 20
_ENTRIES = "uploads"
_WAIT_SECONDS = 10.0
"""For others that change a file of the folder, which takes milliseconds."""


@dataclass(frozen=True)
class Begun:
    """An upload that has begun."""

    save: Save
    place: str
    """Its name in the other folder."""
    done: Mapping[str, int] = field(default_factory=dict)
    """The files that are complete there, and their sizes in bytes; of an object store, which has them listed, none."""


@dataclass(frozen=True)
class Record:
    """The contents of the file."""

    address: str = ""
    """The other folder, as people write it."""
    folder_id: str = ""
    """Its id."""
    begun: Begun | None = None
    stored: Mapping[Save, float] = field(default_factory=dict)
    """What was last seen there, and the Unix second at which it was complete."""


def read_all(root: Path) -> list[Record]:
    """Return the records in the folder of checkpoints `root`, one for each other folder; none that cannot be read.

    Raises FormatTooNew and FormatTooOld.
    """
    try:
        return [_parsed_record(each) for each in _record_entries(_read_document(root))]
    except (OSError, CheckpointUnsafe, ValueError, RecursionError):
        return []


def read(root: Path, address: str) -> Record:
    """Return the record in `root` of what was uploaded to `address`; an empty one without one. Raises as `read_all`."""
    return next((each for each in read_all(root) if each.address == address), Record(address))


def write_record(root: Path, record: Record) -> None:
    """Write `record` into the folder of checkpoints `root`, in place of the one of its address.

    Raises OSError, and as `read_all`.
    """
    with locked(root, _WAIT_SECONDS):
        try:
            found = _read_document(root)
            entries = {value_of(each, "address", str): each for each in _record_entries(found)}
        except (OSError, CheckpointUnsafe, ValueError, RecursionError):
            found, entries = {}, {}
        # What a later version added stays.
        entries[record.address] = entries.get(record.address, {}) | _record_document(record)
        document = {**FORMAT, **unknown_fields(found, {_ENTRIES}), _ENTRIES: [*entries.values()]}
        DISK.write_atomically(root / layout.UPLOADS, json_bytes(document, indent=1))


def _read_document(root: Path) -> dict[str, Any]:
    """Return what the file holds. Raises ValueError where that is no such record, and as `read_all`."""
    path = root / layout.UPLOADS
    document = json_object(read_plain(path, _MOST_BYTES))
    check_format({"format_version": 1} | document if _ENTRIES in document else document, str(path))
    return document


def _record_entries(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [_json_object(each) for each in value_of(document, _ENTRIES, list)]


def _record_document(record: Record) -> dict[str, Any]:
    begun = record.begun
    under_way = None if begun is None else {**_save_fields(begun.save), "place": begun.place, "done": dict(begun.done)}
    return {
        "address": record.address,
        "folder_id": record.folder_id,
        "begun": under_way,
        "stored": [{**_save_fields(save), "stored_at": at} for save, at in sorted(record.stored.items())],
    }


def _parsed_record(document: dict[str, Any]) -> Record:
    """Return the record in `document`. Raise ValueError if it is not what `_record_document` makes."""
    begun = document.get("begun")
    stored: list[Any] = value_of(document, "stored", list)
    return Record(
        value_of(document, "address", str),
        value_of(document, "folder_id", str),
        None if begun is None else _begun_upload(_json_object(begun)),
        {_saved(_json_object(each)): seconds(each, "stored_at") for each in stored},
    )


def _begun_upload(document: dict[str, Any]) -> Begun:
    done: dict[str, Any] = value_of(document, "done", dict)
    return Begun(
        _saved(document),
        file_name(value_of(document, "place", str)),
        {file_name(name): integer_field(done, name, 0) for name in done},
    )


def _json_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


def _save_fields(save: Save) -> dict[str, Any]:
    return dict(zip(("step", "run_id", "created_at"), save, strict=True))


def _saved(document: dict[str, Any]) -> Save:
    return integer_field(document, "step", 0), value_of(document, "run_id", str), seconds(document, "created_at")
