"""`head.json` as text: plain JSON, a line for each checkpoint, the last line the digest of everything before it.

So damage differs from what another version of this package writes: the first has a wrong digest and can be
rebuilt, the second must not be touched.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from torchtitan_lite.bucket import naming
from torchtitan_lite.bucket.head import Entry, Head, Status
from torchtitan_lite.store.format_version import FORMAT, check_format, unknown_fields
from torchtitan_lite.store.holder import Holder
from torchtitan_lite.store.manifest import CheckpointKind, seal
from torchtitan_lite.store.manifest_fields import number, refuse_constant, value_of

_FIELDS = frozenset({"epoch", "change", "holder", "beat_seconds", "pinned", "checkpoints", "digest"})
_FIELDS_OF_ENTRY = frozenset({"step", "attempt", "kind", "run_id", "digest", "status", "findings"})
_DIGEST = b',\n"digest": "'


class WrongDigest(ValueError):
    """The text does not end with its own digest."""


def to_text(head: Head) -> bytes:
    """Return the contents of head.json; equal heads give equal bytes."""
    lines = {
        **FORMAT,
        **head.unknown,
        "epoch": head.epoch,
        "change": head.change,
        "holder": None if head.holder is None else dataclasses.asdict(head.holder),
        "beat_seconds": float(head.beat_seconds),
        "pinned": sorted(head.pinned),
    }
    texts = [f'"{name}": {_dump(value)}' for name, value in lines.items()]
    entries = ",\n".join(_dump(_entry_json(entry)) for entry in head.entries)
    return seal(("{\n" + ",\n".join([*texts, f'"checkpoints": [\n{entries}\n]'])).encode())


def parse(data: bytes, path: str) -> Head:
    """Return the head in `data`, the contents of `path`.

    Raises WrongDigest if it was changed or cut, FormatTooNew, FormatTooOld, and ValueError that names a wrong field.
    """
    text, _, _ = data.rpartition(_DIGEST)
    if not text or seal(text) != data:
        raise WrongDigest("its last line is not its digest")
    document = json.loads(data, parse_constant=refuse_constant)
    if not isinstance(document, dict):
        raise ValueError("expected a JSON object")
    check_format(document, path)
    return Head(
        epoch=number(document, "epoch", 0),
        change=number(document, "change", 0),
        holder=_holder(document),
        beat_seconds=_beat_seconds(document),
        pinned=frozenset(_steps(value_of(document, "pinned", list))),
        entries=tuple(_entry(each) for each in value_of(document, "checkpoints", list)),
        unknown=unknown_fields(document, _FIELDS),
    )


def _entry_json(entry: Entry) -> dict[str, Any]:
    document = {
        "step": entry.step,
        "attempt": entry.attempt,
        "kind": entry.kind.value,
        "run_id": entry.run_id,
        "digest": entry.digest,
        "status": entry.status.value,
    }
    return document | ({"findings": list(entry.findings)} if entry.findings else {}) | dict(entry.unknown)


def _entry(document: Any) -> Entry:
    if not isinstance(document, dict):
        raise ValueError(f"checkpoints: expected objects, found {document!r:.40}")
    attempt = value_of(document, "attempt", str)
    if not naming.is_attempt(attempt):
        raise ValueError(f"attempt: expected 16 hex digits, found {attempt!r:.40}")
    return Entry(
        step=number(document, "step", 0),
        attempt=attempt,
        kind=CheckpointKind(value_of(document, "kind", str)),
        run_id=value_of(document, "run_id", str),
        digest=value_of(document, "digest", str),
        status=Status(value_of(document, "status", str)),
        findings=tuple(str(each) for each in document.get("findings", ())),
        unknown=unknown_fields(document, _FIELDS_OF_ENTRY),
    )


def _holder(document: dict[str, Any]) -> Holder | None:
    found = document.get("holder")
    if found is None:
        return None
    if (holder := Holder.parse(_dump(found).encode())) is None:
        raise ValueError(f"holder: expected a process, found {found!r:.100}")
    return holder


def _beat_seconds(document: dict[str, Any]) -> float:
    found = value_of(document, "beat_seconds", float)
    if not 0 <= found < math.inf:
        raise ValueError(f"beat_seconds: expected seconds, found {found}")
    return found


def _steps(found: list[Any]) -> list[int]:
    if not all(type(step) is int and 0 <= step < 1 << 63 for step in found):
        raise ValueError(f"pinned: expected steps, found {found!r:.40}")
    return found


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
