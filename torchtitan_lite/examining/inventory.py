"""What is in a folder of checkpoints, for a person: also what no job would load.

Each manifest is read once and the files' sizes are compared with it; nothing else is opened, and nothing is changed, so
a job may write there meanwhile. Of a folder without a manifest only names and sizes are certain: its kind and its
origin follow from the words in its `.metadata`, which is not parsed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import re
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_lite.config.job_config import Checkpoint, flat_config
from torchtitan_lite.disk.plain_file import read_plain, size_finding
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnreadable, CheckpointUnsafe, ConfigError, UnknownFormat
from torchtitan_lite.examining.opened import (
    POSITIONS_OF_TORCHTITAN,
    SavingJob,
    WrittenBy,
    absence,
    num_writers,
    origin_by,
)
from torchtitan_lite.examining.other_libraries import (
    absence_in,
    description_of,
    is_half_written,
    is_lightning_file,
    is_lightning_folder,
    lightning_step_of,
    transformers_step_of,
    weights_in,
)
from torchtitan_lite.examining.recorded_digests import files_in
from torchtitan_lite.examining.verified import Verified, verified, verified_in
from torchtitan_lite.log import counted
from torchtitan_lite.store import layout
from torchtitan_lite.store.described import read_description
from torchtitan_lite.store.known_manifests import checkpoint_info
from torchtitan_lite.store.layout import Listing, is_folder
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind, Manifest, without_abandoned
from torchtitan_lite.store.manifest_fields import DCP_METADATA
from torchtitan_lite.store.place import Place
from torchtitan_lite.store.retention import Verdict, build_retention, judge_checkpoints

_FINDINGS_BYTES = 1 << 20
_ROLLED_BACK = "its run rolled back"
# A string in a pickle: the operation and the length, then the text.
_TEXT = rb"(?:\x8c.|X.{4})"
_OPTIMIZER = re.compile(_TEXT + rb"optim[a-z_0-9]*\.", re.DOTALL)
_POSITIONS = re.compile(_TEXT + re.escape(POSITIONS_OF_TORCHTITAN.encode()), re.DOTALL)


class FolderState(enum.Enum):
    """Whether a checkpoint can be loaded, or why not."""

    COMMITTED = "committed"
    """Ours, and its files have the right sizes."""
    FOREIGN = "foreign"
    """Not ours, with `.metadata`: plain DCP's or torchtitan's."""
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    """The system refused to read it."""
    UNKNOWN_FORMAT = "unknown_format"
    HALF_WRITTEN = "half_written"
    """A save that is under way, or was cut off."""
    QUARANTINED = "quarantined"
    """Found damaged by a load, and renamed."""
    ABANDONED = "abandoned"
    """Of a branch that a run left by rolling back."""
    SET_ASIDE = "set_aside"
    """In the way of another checkpoint, and renamed."""
    BEING_REPLACED = "being_replaced"
    """A cut save left it: the next start of a job puts it back or removes it."""
    BEING_REMOVED = "being_removed"


USABLE = (FolderState.COMMITTED, FolderState.FOREIGN)
"""What a job can load by itself or by name."""


@dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """One checkpoint, or what is left of one."""

    name: str
    """Of its folder, or of its prefix in an object store."""
    state: FolderState
    step: int | None
    nbytes: int
    """Bytes of its files; of a committed one without its manifest."""
    created_at: float
    """Unix seconds."""
    origin: WrittenBy | None = None
    kind: CheckpointKind | None = None
    saved_by: SavingJob = field(default_factory=SavingJob)
    finding: str = ""
    """What is wrong with it."""
    verified: Verified | None = None
    info: CheckpointInfo | None = field(default=None, repr=False)
    """What its manifest says of it."""
    has_name_of_step: bool = False
    """Whether it has the place of its step, so that a pin of the step is for it."""

    @property
    def committed(self) -> CheckpointInfo | None:
        """What the store knows of a committed one."""
        return self.info if self.state is FolderState.COMMITTED else None

    @property
    def lineage(self) -> Lineage | None:
        """Its run and branch; None without a manifest, and for a copy, which is none of its run."""
        return self.info.lineage if self.info is not None and self.state is not FolderState.FOREIGN else None


def inventory(root: Path) -> list[ListedCheckpoint]:
    """Return what is in the folder of checkpoints `root`, by ascending step; what is not a checkpoint is left out."""
    records = verified_in(root)
    entries = []
    for name in Listing(root).names:
        # What a job removes or renames meanwhile is not there any more.
        with contextlib.suppress(FileNotFoundError):
            entry = _folder_entry(root / name)
            if entry is not None:
                is_step = layout.parse_step(name) is not None
                result = verified(root / name, records)
                entries.append(dataclasses.replace(entry, verified=result, has_name_of_step=is_step))
    return sorted_entries(with_abandoned(entries))


def sorted_entries(entries: Iterable[ListedCheckpoint]) -> list[ListedCheckpoint]:
    """Return `entries` by ascending step; of one step, those first that can be loaded."""
    return sorted(entries, key=lambda entry: (entry.step is None, entry.step or 0, entry.state not in USABLE))


def _folder_entry(folder: Path) -> ListedCheckpoint | None:
    name = folder.name
    if (step := layout.parse_step(name)) is not None:
        return _step_entry(folder, step)
    if (step := layout.parse_staging(name)) is not None:
        return _unusable_entry(folder, FolderState.HALF_WRITTEN, step, absence(folder))
    if (pair := layout.parse_trash(name)) is not None:
        return _unusable_entry(
            folder, FolderState.BEING_REMOVED, pair[0], "it is being removed, or its removal was cut off"
        )
    if (pair := layout.parse_replaced(name)) is not None:
        finding = "another checkpoint takes its place; a cut save is cleaned up at the next start of the job"
        return _unusable_entry(folder, FolderState.BEING_REPLACED, pair[0], finding)
    if (aside := layout.parse_set_aside(name)) is not None:
        return _of_aside(folder, *aside)
    if is_lightning_file(folder):
        return _other_library_entry(folder, WrittenBy.LIGHTNING, folder, lightning_step_of(name))
    if not is_folder(folder):
        return None
    try:
        return _of_any_name(folder)
    except PermissionError as error:
        # Of a folder with another name it is not even known that it is a checkpoint.
        step = transformers_step_of(name)
        return (
            None
            if step is None
            else _unusable_entry(folder, FolderState.UNREADABLE, step, error.strerror or str(error))
        )


def _of_any_name(folder: Path) -> ListedCheckpoint | None:
    name = folder.name
    if (folder / layout.METADATA).is_file():
        return _foreign(folder, lightning_step_of(name) if is_lightning_folder(folder) else None)
    if (step := transformers_step_of(name)) is not None or description_of(folder) is not None:
        return _of_transformers(folder, step)
    if is_half_written(folder):
        return _unusable_entry(folder, FolderState.HALF_WRITTEN, lightning_step_of(name), absence(folder))
    return _listed_copy(folder)


def _step_entry(folder: Path, step: int) -> ListedCheckpoint:
    try:
        if not is_folder(folder):
            return _unusable_entry(folder, FolderState.DAMAGED, step, "it is no folder")
        manifest = Manifest.of_folder(folder)
        if manifest is None:
            if (finding := absence(folder)) or not (folder / layout.METADATA).is_file():
                return _unusable_entry(
                    folder, FolderState.HALF_WRITTEN, step, finding or f"there is no {layout.METADATA} in it"
                )
            return _foreign(folder, step)
        if manifest.step != step:
            return _unusable_entry(
                folder, FolderState.DAMAGED, step, f"{layout.MANIFEST}: it is the manifest of step {manifest.step}"
            )
        found = (size_finding(folder / name, record.size) for name, record in sorted(manifest.files.items()))
        finding = in_short([each for each in found if each])
    except (UnknownFormat, CheckpointDamaged, CheckpointUnsafe, OSError) as error:
        state, finding = state_of_error(error)
        return _unusable_entry(folder, state, step, finding)
    return managed(folder, manifest, FolderState.DAMAGED if finding else FolderState.COMMITTED, finding)


def _of_aside(folder: Path, step: int, why: str) -> ListedCheckpoint:
    """Return the entry of a renamed checkpoint, with what its manifest says if that can be read."""
    state = {"corrupt": FolderState.QUARANTINED, "abandoned": FolderState.ABANDONED}.get(why, FolderState.SET_ASIDE)
    finding = {"abandoned": _ROLLED_BACK, "weights": "a full checkpoint took its name"}.get(why)
    finding = finding or (_quarantine_findings(folder) if why == "corrupt" else "it was in the way of a checkpoint")
    try:
        manifest = Manifest.of_folder(folder) if is_folder(folder) else None
    except (CheckpointDamaged, CheckpointUnsafe, UnknownFormat, OSError):
        manifest = None
    return (
        _unusable_entry(folder, state, step, finding) if manifest is None else managed(folder, manifest, state, finding)
    )


def _quarantine_findings(folder: Path) -> str:
    """Return what a load wrote about the quarantined checkpoint in `folder`; in general words if nothing is known."""
    try:
        document = json.loads(read_plain(folder / layout.FINDINGS, _FINDINGS_BYTES))
        return "; ".join(str(finding) for finding in document["findings"])
    except (OSError, CheckpointUnsafe, ValueError, KeyError, TypeError, RecursionError):
        return "it was found damaged"


def managed(folder: Place, manifest: Manifest, state: FolderState, finding: str) -> ListedCheckpoint:
    """Return the entry of the checkpoint in `folder`, as its manifest describes it."""
    return ListedCheckpoint(
        name=folder.name,
        state=state,
        step=manifest.step,
        nbytes=manifest.nbytes,
        created_at=manifest.created_at,
        origin=WrittenBy.OURS,
        kind=manifest.kind,
        saved_by=SavingJob.of(manifest),
        finding=finding,
        info=checkpoint_info(folder, manifest),
    )


def _listed_copy(folder: Path) -> ListedCheckpoint | None:
    """Return the entry of a copy of one of ours that was saved without `.metadata`, under a name of its own."""
    try:
        manifest = Manifest.of_folder(folder)
    except (CheckpointDamaged, CheckpointUnsafe, UnknownFormat):
        return None
    if manifest is None or DCP_METADATA not in manifest.extra:
        return None
    entry = managed(folder, manifest, FolderState.FOREIGN, "")
    return dataclasses.replace(entry, step=None, nbytes=sum(_file_sizes(folder).values()))


def _of_transformers(folder: Path, step: int | None) -> ListedCheckpoint:
    try:
        if finding := absence_in(folder):
            return _unusable_entry(folder, FolderState.HALF_WRITTEN, step, finding)
        weights_in(folder)
        description = description_of(folder) or folder
        return _other_library_entry(folder, origin_by(description), description, step)
    except (CheckpointDamaged, CheckpointUnsafe, OSError) as error:
        state, finding = state_of_error(error)
        return _unusable_entry(folder, state, step, finding)


def _other_library_entry(folder: Path, origin: WrittenBy, description: Path, step: int | None) -> ListedCheckpoint:
    sizes = {name: found.st_size for name, found in files_in(folder)}
    is_full = origin is WrittenBy.LIGHTNING or any(name.startswith("optimizer") for name in sizes)
    return ListedCheckpoint(
        name=folder.name,
        state=FolderState.FOREIGN,
        step=step,
        nbytes=sum(sizes.values()),
        created_at=description.lstat().st_mtime,
        origin=origin,
        kind=CheckpointKind.FULL if is_full else CheckpointKind.WEIGHTS_ONLY,
    )


def _foreign(folder: Path, step: int | None) -> ListedCheckpoint:
    sizes = _file_sizes(folder)
    try:
        text = read_description(folder / layout.METADATA, b".")
    except (CheckpointDamaged, CheckpointUnsafe) as error:
        return _unusable_entry(folder, FolderState.DAMAGED, step, error.finding)
    origin = WrittenBy.TORCHTITAN if _POSITIONS.search(text) else WrittenBy.DCP
    origin = WrittenBy.LIGHTNING if is_lightning_folder(folder) else origin
    if step is None and layout.MANIFEST in sizes:
        origin = WrittenBy.OURS  # A copy under another name.
    return ListedCheckpoint(
        name=folder.name,
        state=FolderState.FOREIGN,
        step=step,
        nbytes=sum(sizes.values()),
        created_at=(folder / layout.METADATA).lstat().st_mtime,
        origin=origin,
        kind=CheckpointKind.FULL if _OPTIMIZER.search(text) else CheckpointKind.WEIGHTS_ONLY,
        saved_by=SavingJob(num_writers(sizes) or None),
    )


def _unusable_entry(folder: Path, state: FolderState, step: int | None, finding: str) -> ListedCheckpoint:
    nbytes = sum(_file_sizes(folder).values())
    changed = folder.lstat().st_mtime
    return ListedCheckpoint(
        name=folder.name, state=state, step=step, nbytes=nbytes, created_at=changed, finding=finding
    )


def state_of_error(error: Exception) -> tuple[FolderState, str]:
    """Return what a checkpoint is whose description cannot be read, and why. Raise the error if it is gone."""
    match error:
        case UnknownFormat():
            return FolderState.UNKNOWN_FORMAT, error.in_short
        case CheckpointDamaged():
            return FolderState.DAMAGED, error.summary
        case CheckpointUnsafe():
            return FolderState.DAMAGED, f"{Path(error.path).name}: {error.finding}"
        case CheckpointUnreadable():
            return FolderState.UNREADABLE, error.cause
        case OSError() if not isinstance(error, FileNotFoundError):
            return FolderState.UNREADABLE, error.strerror or str(error)
    raise error  # A job removed it meanwhile: `inventory` leaves it out.


def _file_sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each file in `folder`; none if it is no folder or cannot be listed."""
    try:
        with os.scandir(folder) as found:
            return {file.name: file.stat(follow_symlinks=False).st_size for file in found}
    except (NotADirectoryError, PermissionError):
        return {}


def in_short(found: Sequence[str]) -> str:
    """Return the findings `found`, one for each file, in one line; the empty string if there are none."""
    return found[0] + (f", and {counted(len(found) - 1, 'more file')}" if len(found) > 1 else "") if found else ""


def with_abandoned(entries: Iterable[ListedCheckpoint]) -> list[ListedCheckpoint]:
    """Return `entries`; those that a committed one abandons have that state, renamed or not, and the reason."""
    entries = list(entries)
    infos = [entry.committed for entry in entries if entry.committed is not None]
    kept = {info.path.name for info in without_abandoned(infos)}
    reasons = {}
    for each in entries:
        for pair in each.lineage.abandons if each.lineage else ():
            began = each.lineage.began_at if each.lineage else None
            reasons[pair] = "its run counts from step 1 again" if began is None else f"rolled back to step {began}"
    for number, entry in enumerate(entries):
        if entry.state is FolderState.ABANDONED or (entry.committed is not None and entry.name not in kept):
            pair = (entry.step or 0, entry.lineage.run_id if entry.lineage else "")
            # What abandoned it may be gone by now.
            finding = reasons.get(pair, _ROLLED_BACK)
            entries[number] = dataclasses.replace(entry, state=FolderState.ABANDONED, finding=finding)
    return entries


# What the run that saved last would remove from its folder, by the `keep_` keys in its latest checkpoint.
#
# A running job may have other keys by now, and it also keeps what it loaded or saved itself; so this is an outlook.


_DEFAULTS = Checkpoint()
_KEYS = [each.name for each in dataclasses.fields(Checkpoint) if each.name.startswith("keep_")]


def keep_keys(entries: Iterable[ListedCheckpoint]) -> dict[str, Any]:
    """Return the `keep_` keys of the latest full checkpoint that are not at their defaults, by name."""
    full = [entry for entry in entries if entry.state is FolderState.COMMITTED and entry.kind is CheckpointKind.FULL]
    today = flat_config(full[-1].saved_by.config) if full else {}
    found = {key: today[f"checkpoint.{key}"] for key in _KEYS if f"checkpoint.{key}" in today}
    return {key: value for key, value in found.items() if value != getattr(_DEFAULTS, key)}


def outlook(
    entries: Iterable[ListedCheckpoint], keys: dict[str, Any], pinned: AbstractSet[int], now: float
) -> dict[int, Verdict]:
    """Return what retention by `keys` would do with each committed checkpoint, by step; nothing for invalid keys."""
    try:
        policy = build_retention(Checkpoint(**keys))
    except (ConfigError, TypeError, ValueError):
        return {}
    committed = [entry.committed for entry in entries if entry.committed is not None]
    return {verdict.info.step: verdict for verdict in judge_checkpoints(policy, committed, pinned=pinned, now=now)}
