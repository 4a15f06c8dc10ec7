"""`head.json` in an object store: its text, read, and replaced on condition.

A swap names the version that it was computed from, so it is carried out upon exactly that one or refused. An answer may
be lost after the swap was carried out, and a client that repeats the request then reports a refusal. So after every
failure the head is read again, and the change is made once more of what is there: a change that is in it already
changes nothing.

The text is plain JSON, a line for each checkpoint, the last line the digest of everything before it. So damage differs
from what another version of this package writes: the first has a wrong digest and can be rebuilt, the second must not
be touched.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_lite.bucket import naming
from torchtitan_lite.bucket.head import Entry, Head, Status
from torchtitan_lite.bucket.objects import Condition, ConditionFailed, Objects, StoreUnavailable
from torchtitan_lite.errors import FolderUnusable
from torchtitan_lite.store.format_version import FORMAT, check_format, unknown_fields
from torchtitan_lite.store.holder import Holder
from torchtitan_lite.store.lease import LeaseClock
from torchtitan_lite.store.manifest import CheckpointKind, compact_json, seal
from torchtitan_lite.store.manifest_fields import integer_field, json_object, seconds, steps_field, value_of

DEADLINE_SECONDS = 120.0
"""For one change with all its repetitions. Two deadlines of a request, so one that hung may be repeated."""


@dataclass(frozen=True)
class FoundHead:
    """What was at the place of the head."""

    head: Head | None
    """None if there was nothing, or something damaged."""
    condition: Condition | None
    """For the next write; None if there was nothing."""


class HeadFile:
    """The head of the folder of `objects`. Any thread."""

    def __init__(self, objects: Objects, clock: LeaseClock) -> None:
        self.path = f"{objects.address}/{naming.HEAD}"
        self._objects = objects
        self._clock = clock

    def look(self) -> FoundHead:
        """Return what is there, damaged or not.

        Raises FormatTooNew, FolderUnusable for what is undamaged and no head, and OSError: then nothing is known.
        """
        try:
            found = self._look_once()
            # Twice, because what was read may have been damaged on its way.
            return found if found.head is not None else self._look_once()
        except FileNotFoundError:
            return FoundHead(None, None)

    def read(self) -> tuple[Head, Condition]:
        """Return the head and the condition that it is this version.

        Raises as `look`, FileNotFoundError if there is none, and FolderUnusable if it is damaged.
        """
        found = self.look()
        if found.condition is None:
            raise FileNotFoundError(f"{self.path} does not exist")
        if found.head is None:
            raise FolderUnusable(self.path, "it is damaged; the next start of a job rebuilds it from the manifests")
        return found.head, found.condition

    def write(self, head: Head, condition: Condition | None) -> None:
        """Write `head` in place of the version of `condition`; None: where there is nothing.

        Raises OSError; after `ConditionFailed`, too, the head may be written, by a request whose answer was lost.
        """
        text = head_to_bytes(replace(head, change=head.change + 1))
        self._objects.put_if(naming.HEAD, text, condition)

    def change(self, make: Callable[[Head], Head]) -> Head:
        """Replace the head by what `make` returns for it, in one swap; return that.

        `make` is called again for each version that is found there after a failure, and returns its argument once its
        change is in it. Raises what `make` raises, what `read` raises, and OSError: the head may be changed then.
        """
        began = self._clock.monotonic()
        for pause in itertools.chain((0.0, 0.1, 0.5, 2.0), itertools.repeat(5.0)):
            head, condition = self.read()
            changed = make(head)
            if changed == head:
                return head
            try:
                self.write(changed, condition)
                return changed
            except (ConditionFailed, FileNotFoundError, StoreUnavailable) as error:
                if self._clock.monotonic() - began >= DEADLINE_SECONDS:
                    raise StoreUnavailable(f"{self.path} could not be replaced: {error}") from error
            self._clock.sleep(pause)
        raise AssertionError("the pauses have no end")

    def _look_once(self) -> FoundHead:
        data, condition = self._objects.get(naming.HEAD)
        try:
            return FoundHead(parse_head(data, self.path), condition)
        except WrongDigest:
            return FoundHead(None, condition)
        except (ValueError, RecursionError) as error:
            # Not damage, so it is not rebuilt: that would lose what it says.
            raise FolderUnusable(self.path, f"{error}; restore it from a copy, or remove it") from error


_FIELDS = frozenset({"epoch", "change", "holder", "beat_seconds", "pinned", "checkpoints", "digest"})
_FIELDS_OF_ENTRY = frozenset({"step", "attempt", "kind", "run_id", "digest", "status", "findings"})
_DIGEST = b',\n"digest": "'


class WrongDigest(ValueError):
    """The text does not end with its own digest."""


def head_to_bytes(head: Head) -> bytes:
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
    texts = [f'"{name}": {compact_json(value)}' for name, value in lines.items()]
    entries = ",\n".join(compact_json(_entry_json(entry)) for entry in head.entries)
    return seal(("{\n" + ",\n".join([*texts, f'"checkpoints": [\n{entries}\n]'])).encode())


def parse_head(data: bytes, path: str) -> Head:
    """Return the head in `data`, the contents of `path`.

    Raises WrongDigest if it was changed or cut, FormatTooNew, FormatTooOld, and ValueError that names a wrong field.
    """
    text, _, _ = data.rpartition(_DIGEST)
    if not text or seal(text) != data:
        raise WrongDigest("its last line is not its digest")
    document = json_object(data)
    check_format(document, path)
    return Head(
        epoch=integer_field(document, "epoch", 0),
        change=integer_field(document, "change", 0),
        holder=_holder(document),
        beat_seconds=_beat_seconds(document),
        pinned=steps_field(document, "pinned"),
        entries=tuple(_head_entry(each) for each in value_of(document, "checkpoints", list)),
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


def _head_entry(document: Any) -> Entry:
    if not isinstance(document, dict):
        raise ValueError(f"checkpoints: expected objects, found {document!r:.40}")
    attempt = value_of(document, "attempt", str)
    if not naming.is_attempt(attempt):
        raise ValueError(f"attempt: expected 16 hex digits, found {attempt!r:.40}")
    return Entry(
        step=integer_field(document, "step", 0),
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
    if (holder := Holder.parse(compact_json(found).encode())) is None:
        raise ValueError(f"holder: expected a process, found {found!r:.100}")
    return holder


def _beat_seconds(document: dict[str, Any]) -> float:
    if (found := seconds(document, "beat_seconds")) < 0:
        raise ValueError(f"beat_seconds: expected seconds, found {found}")
    return found
