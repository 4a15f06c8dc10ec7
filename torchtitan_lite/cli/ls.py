"""`ls`: the checkpoints in a folder, by run, and what else is there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from torchtitan_lite.cli.named_checkpoint import SpeltAddress, folder_of_checkpoints, names_step, none_in
from torchtitan_lite.cli.screen import Screen, age, plain_table
from torchtitan_lite.config.address import is_address
from torchtitan_lite.config.argument_parser import Positional
from torchtitan_lite.errors import CheckpointNotFound, ConfigError, PinsUnreadable, UnknownFormat
from torchtitan_lite.examining.inventory import USABLE, ListedCheckpoint, inventory, keep_keys, outlook
from torchtitan_lite.examining.opened import SavingJob, WrittenBy
from torchtitan_lite.examining.verified import FULL
from torchtitan_lite.log import counted, readable_bytes
from torchtitan_lite.store.holder import Holder
from torchtitan_lite.store.layout import is_checkpoint
from torchtitan_lite.store.manifest import CheckpointKind
from torchtitan_lite.store.manifest_fields import topology_in_words
from torchtitan_lite.store.retention import Verdict
from torchtitan_lite.store.store import CheckpointStore
from torchtitan_lite.uploading.choice import save_of
from torchtitan_lite.uploading.record import Record, read_all

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_COLUMNS = ("step", "kind", "size", "age", "ranks", "notes")
_NUMBERS = ("step", "size", "age")
_FOLDED = {"ranks": 16, "notes": 12}
"""Columns that are folded where the screen is too narrow, and their least width."""
_NONE = "there is no checkpoint of any step in it"


@dataclass(frozen=True)
class Ls:
    """List the checkpoints in a folder, and its other contents."""

    folder: Annotated[str, Positional("FOLDER")]
    """A folder of checkpoints, on disk or as an address, or the dump folder of a run."""

    def run(self, screen: Screen) -> None:
        if names_step(self.folder):
            raise ConfigError(f"{self.folder} is a checkpoint, not a folder of checkpoints: use inspect")
        found = (
            _listing_in_store(self.folder)
            if is_address(self.folder)
            else _listing_on_disk(folder_of_checkpoints(self.folder))
        )
        screen.show(found.to_json() if screen.as_json else None, found.render)


@dataclass(frozen=True)
class _Found:
    root: str
    entries: Sequence[ListedCheckpoint]
    holder: Holder | None
    """The job that has the folder now, as far as can be seen from here."""
    pinned: frozenset[int]
    pins_error: str = ""
    uploads: Record = field(default_factory=Record)
    """What was seen of it in another folder, the last one."""
    now: float = field(default_factory=time.time)

    @cached_property
    def keys(self) -> dict[str, Any]:
        return keep_keys(self.entries)

    @cached_property
    def verdicts(self) -> dict[int, Verdict]:
        # Where the pins cannot be known, no job removes anything.
        return {} if self.pins_error else outlook(self.entries, self.keys, self.pinned, self.now)

    @cached_property
    def latest(self) -> ListedCheckpoint | None:
        """The one that a job resumes from; None if there is none."""
        known = [(each, each.committed) for each in self.entries]
        full = [(each, info) for each, info in known if info is not None and info.kind is CheckpointKind.FULL]
        return next((each for each, info in reversed(full) if not info.ranks_differ), full[-1][0] if full else None)

    def goes(self, entry: ListedCheckpoint) -> bool:
        verdict = self.verdict_of(entry)
        return verdict is not None and verdict.goes

    def verdict_of(self, entry: ListedCheckpoint) -> Verdict | None:
        return None if entry.committed is None else self.verdicts.get(entry.committed.step)

    def uploaded_at(self, entry: ListedCheckpoint) -> float | None:
        return None if entry.committed is None else self.uploads.stored.get(save_of(entry.committed))

    def is_pinned(self, entry: ListedCheckpoint) -> bool:
        return entry.step in self.pinned and entry.has_name_of_step

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": self.root,
            "in_use_by": str(self.holder) if self.holder is not None else None,
            "retention": self.keys,
            "uploads_to": self.uploads.address or None,
            "checkpoints": [self._json_of(entry) for entry in self.entries],
        }

    def render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        usable = [entry for entry in self.entries if entry.state in USABLE]
        others = [entry for entry in self.entries if entry.state not in USABLE]
        parts: list[RenderableType] = [f"{self.root}: {counted(len(usable), 'checkpoint')}, {_total(usable)}"]
        if self.holder is not None:
            parts.append(f"In use by {self.holder}")
        if self.uploads.stored:
            (step, *_), at = max(self.uploads.stored.items())
            parts.append(f"Uploaded to {self.uploads.address}: up to step {step}, {age(self.now - at)} ago")
        rows = {entry.name: self._row(entry) for entry in usable}
        widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows.values(), strict=True)]
        for number, (title, of_run) in enumerate(_by_run(usable)):
            table = _listing_table(widths, [rows[entry.name] for entry in of_run], with_header=number == 0)
            parts += ["", Text(title, style="bold"), table]
        if others:
            parts += ["", Text(f"Not loaded by any job, {_total(others)}", style="bold"), self._others(others)]
        if self.keys and any(map(self.goes, usable)):
            rules = ", ".join(f"{key} {value}" for key, value in self.keys.items())
            parts += ["", f"To be removed by {rules}, the latest checkpoint's configuration."]
        if self.pins_error:
            parts += ["", f"Nothing is removed: {self.pins_error}"]
        if usable and is_address(self.root):
            last = self.latest or usable[-1]
            # Not folded: the address is to be copied.
            address = Text(f"{self.root}/{last.name}", no_wrap=True, overflow="ignore")
            parts += ["", f"The address of step {last.step}:", address]
        return Group(*parts)

    def _row(self, entry: ListedCheckpoint) -> tuple[str, ...]:
        return (
            entry.name if entry.step is None else str(entry.step),
            entry.kind.value.partition("_")[0] if entry.kind else "",
            readable_bytes(entry.nbytes),
            age(self.now - entry.created_at),
            _ranks(entry.saved_by),
            ", ".join(self._notes(entry)),
        )

    def _notes(self, entry: ListedCheckpoint) -> Iterator[str]:
        if entry is self.latest:
            yield "latest"
        if self.is_pinned(entry):
            yield "pinned"
        if self.goes(entry):
            yield "to be removed"
        if self.uploads.address and entry.committed is not None:
            yield "not uploaded" if self.uploaded_at(entry) is None else "uploaded"
        if entry.info is not None and entry.info.has_nan:
            yield "NaN found"
        if entry.info is not None and entry.info.ranks_differ:
            yield "ranks differ"
        if entry.verified is not None:
            ago = age(self.now - entry.verified.verified_at)
            what = "verified" if entry.verified.depth == FULL else "sizes verified"
            yield f"DAMAGED, found {ago} ago" if entry.verified.num_findings else f"{what} {ago} ago"

    def _others(self, entries: Sequence[ListedCheckpoint]) -> Table:
        table = plain_table("name", "size", "age", "what it is")
        for entry in entries:
            what = entry.state.value.replace("_", " ")
            what += ", pinned" if self.is_pinned(entry) else ""
            what += f": {entry.finding}" if entry.finding else ""
            # Of a committed one in an object store, all of whose objects are gone, nothing is known.
            old = age(self.now - entry.created_at) if entry.created_at else ""
            table.add_row(entry.name, readable_bytes(entry.nbytes), old, what)
        return table

    def _json_of(self, entry: ListedCheckpoint) -> dict[str, Any]:
        verdict, info, checked = self.verdict_of(entry), entry.info, entry.verified
        return {
            "name": entry.name,
            "path": f"{self.root}/{entry.name}",
            "state": entry.state.value,
            "finding": entry.finding,
            "step": entry.step,
            "origin": entry.origin.value if entry.origin else None,
            "kind": entry.kind.value if entry.kind else None,
            "bytes": entry.nbytes,
            "created_at": entry.created_at,
            "world_size": entry.saved_by.world_size,
            "topology": entry.saved_by.topology,
            "lineage": entry.lineage.to_json() if entry.lineage else None,
            "nan_in_weights": info is not None and info.has_nan,
            "ranks_differ": info is not None and info.ranks_differ,
            "metrics": {} if info is None else dict(info.metrics),
            "pinned": self.is_pinned(entry),
            "uploaded_at": self.uploaded_at(entry),
            "kept_by": list(verdict.kept_by) if verdict else None,
            "to_be_removed": verdict.goes if verdict else None,
            "verified": {
                "at": checked.verified_at,
                "depth": checked.depth,
                "findings": checked.num_findings,
            }
            if checked
            else None,
        }


def _listing_table(widths: Sequence[int], rows: Sequence[Sequence[str]], *, with_header: bool) -> Table:
    table = plain_table(show_header=with_header)
    for name, width in zip(_COLUMNS, widths, strict=True):
        side: Literal["left", "right"] = "right" if name in _NUMBERS else "left"
        most = _FOLDED.get(name, width)
        table.add_column(name, justify=side, no_wrap=name not in _FOLDED, min_width=min(width, most))
    for row in rows:
        table.add_row(*row)
    return table


def _ranks(job: SavingJob) -> str:
    return topology_in_words(job.topology) or (counted(job.world_size, "rank") if job.world_size else "")


def _total(entries: Sequence[ListedCheckpoint]) -> str:
    return readable_bytes(sum(entry.nbytes for entry in entries))


def _by_run(entries: Sequence[ListedCheckpoint]) -> list[tuple[str, list[ListedCheckpoint]]]:
    """Return the entries of each run under its title, by the first step of each; those without a manifest are last."""
    groups: dict[str, list[ListedCheckpoint]] = {}
    for entry in sorted(entries, key=lambda entry: entry.lineage is None):
        groups.setdefault(_title(entry), []).append(entry)
    return list(groups.items())


def _title(entry: ListedCheckpoint) -> str:
    if entry.lineage is None and entry.origin is WrittenBy.OURS:
        return "Copies under other names"
    if entry.lineage is None:
        library = entry.origin.library if entry.origin and entry.origin is not WrittenBy.DCP else ""
        return f"Without a manifest: saved by {library}" if library else "Without a manifest"
    begun = entry.lineage.began_at
    return f"Run {entry.lineage.run_id}" + (f", rolled back to step {begun}" if begun is not None else "")


def _listing_on_disk(root: Path) -> _Found:
    entries = inventory(root)
    if not entries and is_checkpoint(root):
        raise ConfigError(f"{root} is a checkpoint, not a folder of checkpoints: use inspect")
    if not entries:
        raise none_in(root, _NONE)
    store, pinned, error = CheckpointStore(root), frozenset[int](), ""
    try:
        pinned = store.pins.read()
    except PinsUnreadable as unreadable:
        error = str(unreadable)
    records: list[Record] = []
    with contextlib.suppress(UnknownFormat):
        records = read_all(root)
    uploads = max(records, key=lambda each: max(each.stored.values(), default=0.0), default=Record())
    seen = store.seen_holder()
    return _Found(str(root), entries, _living(None if seen is None else seen.holder), pinned, error, uploads)


def _listing_in_store(spelling: str) -> _Found:
    # Its client is an extra, and takes its time.
    from torchtitan_lite.bucket.bucket_store import open_bucket
    from torchtitan_lite.examining.stored_inventory import stored_inventory

    store = open_bucket(str(SpeltAddress.of(spelling).folder))
    head, entries = stored_inventory(store)
    if not entries:
        raise CheckpointNotFound(store.address, None, finding=_NONE)
    return _Found(store.address, entries, _living(head.holder), head.pinned)


def _living(holder: Holder | None) -> Holder | None:
    return None if holder is None or holder.has_ended() else holder
