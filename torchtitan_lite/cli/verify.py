"""`verify`: is a checkpoint, or each one in a folder, what was saved?"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from torchtitan_lite.checkpoint.reading.files import files_of
from torchtitan_lite.cli.exit_codes import ExitCode, sentence_of
from torchtitan_lite.cli.named_checkpoint import (
    SpeltAddress,
    folder_of_checkpoints,
    is_one,
    none_in,
    of_other_libraries,
    resolve_any,
)
from torchtitan_lite.cli.screen import Screen
from torchtitan_lite.config.address import is_address
from torchtitan_lite.config.argument_parser import Option, Positional
from torchtitan_lite.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    CheckpointUnreadable,
    CheckpointUnsafe,
    ConfigError,
    UnknownFormat,
)
from torchtitan_lite.examining.file_digests import Finding
from torchtitan_lite.examining.inventory import USABLE, FolderState, inventory
from torchtitan_lite.examining.item_checksums import Checked
from torchtitan_lite.examining.listed_tree import FileState
from torchtitan_lite.examining.opened import kind_from_keys
from torchtitan_lite.examining.presence import checkpoint_identity
from torchtitan_lite.examining.recorded_digests import (
    digests_path,
    read_record,
    states_of,
    take_digests,
    unwritable,
    write_record,
)
from torchtitan_lite.examining.verification import Looked, finding_of, look_at, read_through
from torchtitan_lite.examining.verified import FULL, SIZES, Verified, content_identity, record
from torchtitan_lite.log import counted, listed, readable_bytes
from torchtitan_lite.store import layout
from torchtitan_lite.store.place import Place, on_disk

if TYPE_CHECKING:
    from rich.console import RenderableType


INTACT, DAMAGED, GONE, UNREADABLE, UNKNOWN = "intact", "damaged", "removed", "unreadable", "unknown format"
_VERIFIED = (*USABLE, FolderState.DAMAGED, FolderState.UNREADABLE, FolderState.UNKNOWN_FORMAT)
"""What is verified in a folder; of what was renamed, only a checkpoint that a cut save left without its name."""
_SHOWN_FILES = 3
_SHOWN_FINDINGS = 10
_STYLES = {INTACT: "green", DAMAGED: "bold red", UNREADABLE: "bold red"}


@dataclass(frozen=True)
class Verify:
    """Check that a checkpoint, or each one in a folder, is what was saved.

    Reads every byte, and compares it with the digests. With --sizes: only the
    manifest, the names and sizes of the files, and that their chunks cover
    every tensor. Exits with 3 if anything is damaged.

    Checkpoints of plain DCP or torchtitan have no digests. With --record their
    digests are written into one more file, and later calls compare with it.
    """

    target: Annotated[str, Positional("STEP|FOLDER")]
    """A checkpoint, or a folder of checkpoints: each of them."""
    sizes: bool = False
    """Compare names and sizes only, in milliseconds: finds missing and truncated files."""
    record: bool = False
    """Write the digests of a checkpoint without a manifest into its folder, if it is intact and has no such record."""
    record_to: Annotated[str, Option("FILE")] = ""
    """The same, but write FILE instead, which is outside of it; if FILE is there, compare with it."""
    again: bool = False
    """Replace the record: the checkpoint was saved again on purpose."""

    def run(self, screen: Screen) -> ExitCode:
        self._refuse_options()
        reads = not self.sizes
        folders, is_single = _folders(self.target, screen)
        self._refuse_records(folders, is_single)
        results = [self._looked_at(folder, is_single) for folder in folders]
        begun = time.monotonic()
        if reads:
            self._read_checkpoints(results, is_single, screen)
        seconds = time.monotonic() - begun  # Of reading alone: the speed is the disk's.
        for result in results:
            _record_result(result, reads, screen)
        document = {
            "full": reads,
            "read_seconds": round(seconds, 3) if reads else None,
            "checkpoints": [result.to_json() for result in results],
        }
        screen.show(document, lambda: rendered(results, reads, seconds))
        return _code(results)

    def _looked_at(self, folder: Place, is_single: bool) -> VerifyResult:
        result = VerifyResult(folder)
        with _set_apart(result, is_single):
            files = files_of(folder)
            if (damage := files.damage()) is not None:
                result.add([finding_of(folder, damage)])
                return result
            # Before anything is read, so that what is recorded is what was verified.
            is_ours = os.path.lexists(files.path_of(layout.MANIFEST))
            before = states_of(on_disk(folder)) if self._writes and not is_ours else None
            result.looked = look_at(folder, self._known_record(folder))
            if result.looked.manifest is None and result.looked.recorded is None:
                result.before = before
            result.add(result.looked.findings)
        return result

    def _read_checkpoints(self, results: Sequence[VerifyResult], is_single: bool, screen: Screen) -> None:
        total = sum(result.looked.nbytes for result in results if result.looked is not None)
        total += sum(state.size for result in results for state in (result.before or {}).values())
        with screen.progress("Verifying", total) as advance:
            for result in results:
                if result.looked is None or result.looked.contents is None:
                    continue
                with _set_apart(result, is_single):
                    result.read = read_through(result.looked, advance)
                    result.add(result.read.findings)
                    if result.before is not None and not result.findings:
                        folder = on_disk(result.folder)
                        kind, path = kind_from_keys(result.looked.contents), self._record_of(folder)
                        write_record(path, take_digests(folder, result.before, kind, advance))
                        result.recorded_in = path

    # Checkpoints of ours have digests in their manifest, and get no record.

    @property
    def _writes(self) -> bool:
        return self.record or bool(self.record_to)

    def _refuse_options(self) -> None:
        if self._writes and self.sizes:
            raise ConfigError("--sizes reads no byte, so there is nothing to record: leave one of the two options out")
        if self.record and self.record_to:
            raise ConfigError("--record writes into the checkpoint's folder, --record-to elsewhere: give one of them")
        if self.again and not self._writes:
            raise ConfigError("--again replaces a record: it needs --record or --record-to FILE")

    def _record_of(self, folder: Path) -> Path:
        """Return where the record of the checkpoint in `folder` is."""
        return Path(self.record_to).absolute() if self.record_to else digests_path(folder)

    def _known_record(self, place: Place) -> Path | None:
        """Return where the record is that the checkpoint at `place` is compared with; None in an object store."""
        is_on_disk = place.is_dir() or place.is_file()
        return self._record_of(on_disk(place).absolute()) if is_on_disk and not self.again else None

    def _refuse_records(self, folders: Sequence[Place], is_single: bool) -> None:
        """Raise ConfigError or FolderUnusable where no record can be written, before anything is read."""
        if self.record_to and not is_single:
            raise ConfigError("--record-to FILE is the record of one checkpoint: name one, as FOLDER/step-10")
        for place in folders if self._writes else ():
            folder = on_disk(place, ", where every checkpoint has digests already")
            if os.path.lexists(folder / layout.MANIFEST):
                if is_single:
                    raise ConfigError(f"{folder} has digests in its {layout.MANIFEST}: verify it without a record")
                continue
            path = self._record_of(folder.absolute())
            if self.record_to:
                _refuse_place(path, folder)
            if (self.again or not path.exists()) and not os.access(path.parent, os.W_OK):
                raise unwritable(path, "it is read-only" if path.parent.is_dir() else "it does not exist")


def _folders(spelling: str, screen: Screen) -> tuple[Sequence[Place], bool]:
    """Return the checkpoints that `spelling` means, and whether it names a single one."""
    if is_address(spelling):
        address = SpeltAddress.of(spelling)
        return ([resolve_any(spelling).folder], True) if address.is_step else (_kept_places(address), False)
    path = Path(spelling)
    if not path.is_dir() or is_one(path):
        return [resolve_any(spelling).folder], True
    root = folder_of_checkpoints(spelling)
    others, entries, folders = of_other_libraries(root), inventory(root), []
    steps = {entry.step for entry in entries if entry.has_name_of_step}
    for entry in entries:
        path, is_replaced = root / entry.name, entry.state is FolderState.BEING_REPLACED and entry.step not in steps
        is_its = path in others or (path.is_dir() and (is_replaced or entry.has_name_of_step))
        if entry.state is FolderState.HALF_WRITTEN:
            screen.note(f"{entry.name}: {entry.finding}, so it is not verified")
        elif is_its and (is_replaced or entry.state in _VERIFIED):
            folders.append(path)
    if not folders:
        raise none_in(root, "there is no complete checkpoint in it")
    return folders, False


def _kept_places(address: SpeltAddress) -> list[Place]:
    """Return the checkpoints in the folder at `address`."""
    from torchtitan_lite.bucket.bucket_store import open_bucket  # Its client is an extra, and takes its time.

    store = open_bucket(str(address.folder))
    if not (kept := store.head().kept):
        raise CheckpointNotFound(store.address, None, finding="there is no complete checkpoint in it")
    return [store.place_of(entry.name) for entry in kept]


@contextlib.contextmanager
def _set_apart(result: VerifyResult, is_single: bool) -> Iterator[None]:
    """Keep an error about one of several checkpoints in its `result`; the error of a single one is raised."""
    try:
        yield
    except (UnknownFormat, CheckpointUnreadable, CheckpointUnsafe, OSError) as error:
        if is_single:
            raise
        is_gone, is_unknown = isinstance(error, CheckpointNotFound), isinstance(error, UnknownFormat)
        result.leave(GONE if is_gone else UNKNOWN if is_unknown else UNREADABLE, error)


def _record_result(result: VerifyResult, full: bool, screen: Screen) -> None:
    """Write the result where `ls` finds it. A result that cannot be written is a note."""
    looked = result.looked
    if not result.folder.is_dir():
        return  # Who may read a bucket need not have the right to write there.
    folder = on_disk(result.folder).absolute()
    if layout.parse_step(folder.name) is None or result.reason or looked is None or looked.contents is None:
        return
    try:
        identity = content_identity(folder)
        # Another checkpoint may have the name by now.
        if identity is not None and checkpoint_identity(folder) == looked.identity:
            record(folder, Verified(identity, time.time(), FULL if full else SIZES, len(result.findings)))
    except (OSError, CheckpointUnsafe) as error:
        screen.note(f"note: ls will not show this result: {sentence_of(error)}")


def _code(results: Sequence[VerifyResult]) -> ExitCode:
    statuses = {result.status for result in results}
    if DAMAGED in statuses:
        return ExitCode.DAMAGE
    return ExitCode.FAILED if statuses & {UNREADABLE, UNKNOWN} else ExitCode.FINE


def _refuse_place(record: Path, folder: Path) -> None:
    """Raise ConfigError if `record` is in the checkpoint in `folder`, or is something else than a record."""
    if record.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"--record-to {record} is in the checkpoint: name a file elsewhere, or use --record")
    try:
        read_record(record, folder)
    except (CheckpointDamaged, CheckpointUnsafe) as error:
        raise ConfigError(
            f"--record-to {record}: expected a record of digests, or no file, found another one ({error.finding}): "
            "name another FILE"
        ) from None


@dataclass
class VerifyResult:
    """One checkpoint, and what is known of it so far."""

    folder: Place
    status: str = INTACT
    reason: str = ""
    """Why it is not verified; empty if it is."""
    looked: Looked | None = None
    read: Checked | None = None
    findings: list[Finding] = field(default_factory=list)
    before: Mapping[str, FileState] | None = None
    """The states of its files before they were read, if a record is to be written."""
    recorded_in: Path | None = None
    """The record that was written."""

    @property
    def name(self) -> str:
        return self.folder.absolute().name

    def add(self, findings: Sequence[Finding]) -> None:
        """Add what was found wrong with it."""
        self.findings += findings
        if self.findings:
            self.status = DAMAGED

    def leave(self, status: str, error: Exception) -> None:
        """Give it this status, because `error` ended its verification."""
        self.status, self.reason, self.findings = status, sentence_of(error), []

    @property
    def compared_with(self) -> str:
        """Return what its bytes were compared with: "digests", "checksums" or, if they were not read, ""."""
        if self.read is None or self.looked is None:
            return ""
        return "digests" if self.looked.has_digests else "checksums"

    def to_json(self) -> dict[str, Any]:
        """Return all that is known of it."""
        looked = self.looked
        document: dict[str, Any] = {
            "name": self.name,
            "path": str(self.folder),
            "status": self.status,
            "reason": self.reason,
            "findings": [{"file": each.file, "finding": each.text, "keys": list(each.keys)} for each in self.findings],
        }
        if looked is not None:
            document |= {
                "has_manifest": looked.manifest is not None,
                "files": len(looked.sizes),
                "tensors": 0 if looked.contents is None else len(looked.contents.tensors),
                "bytes": looked.nbytes,
                "unknown_files": list(looked.unknown),
            }
            if looked.manifest is None and (self.recorded_in is not None or looked.recorded is not None):
                document["record"] = {
                    "written": str(self.recorded_in) if self.recorded_in is not None else None,
                    "compared_with_that_of": looked.recorded.created_at if looked.recorded is not None else None,
                }
        if self.read is not None:
            document |= {"compared_with": self.compared_with, "without_checksum": self.read.num_without_checksum}
            document |= {"nan_in": list(self.read.nan_in)}
        return document


def rendered(results: Sequence[VerifyResult], full: bool, seconds: float) -> RenderableType:
    """Return the table, the findings and the summary of `results`, read in `seconds` if in `full`."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 3, 0, 0))
    for column in ("name", "status"):
        table.add_column(column, no_wrap=True)
    for column in ("files", "tensors", "size"):
        table.add_column(column, no_wrap=True, justify="right")
    parts: list[RenderableType] = [Padding(table, (0, 0, 0, 2))]
    for result in results:
        status = Text(result.status.upper() if result.status == DAMAGED else result.status)
        status.stylize(_STYLES.get(result.status, ""))
        table.add_row(result.name, status, *_figures(result))
        if result.findings or result.reason:
            parts += ["", result.name, *_details(result)]
    return Group(*parts, "", *_verify_summary(results, full, seconds))


def _figures(result: VerifyResult) -> list[str]:
    looked = result.looked
    if looked is None or looked.contents is None:
        return ["", "", ""]
    num_files, num_tensors = len(looked.sizes), len(looked.contents.tensors)
    return [counted(num_files, "file"), counted(num_tensors, "tensor"), readable_bytes(looked.nbytes)]


def _details(result: VerifyResult) -> list[RenderableType]:
    from rich.padding import Padding

    lines: list[tuple[int, str]] = [(2, result.reason)] if result.reason else []
    for finding in result.findings[:_SHOWN_FINDINGS]:
        lines.append((2, f"{finding.file}: {finding.text}" if finding.file else finding.text))
        if finding.keys:
            lines.append((4, f"in it: {listed(finding.keys)}"))
    if result.findings and result.looked is not None and result.looked.recorded is not None:
        since = _date(result.looked.recorded.created_at)
        lines.append(
            (2, f"Recorded on {since}. If it was saved again since, replace the record with --record --again.")
        )
    if len(result.findings) > _SHOWN_FINDINGS:
        lines.append((2, f"... and {len(result.findings) - _SHOWN_FINDINGS} more; --json has all of them"))
    return [Padding(text, (0, 0, 0, indent)) for indent, text in lines]


def _verify_summary(results: Sequence[VerifyResult], full: bool, seconds: float) -> list[str]:
    verified = [result for result in results if not result.reason]
    num_damaged = sum(result.status == DAMAGED for result in verified)
    what = counted(len(verified), "checkpoint")
    if not full:
        end = f"{num_damaged} damaged" if num_damaged else "nothing is missing or truncated"
        lines = [f"{what}, sizes only: {end}. No byte was read."]
    else:
        end = f"{num_damaged} damaged" if num_damaged else "nothing is damaged"
        nbytes = sum(result.looked.nbytes for result in verified if result.read is not None and result.looked)
        speed = f" ({seconds:.1f} s, {readable_bytes(int(nbytes / seconds))}/s)" if seconds >= 0.1 else ""
        lines = [f"{what}, every byte{speed}: {end}."]
    for result in verified:
        name = result.name
        if result.recorded_in is not None:
            num_files = counted(len(result.before or ()), "file")
            lines.append(f"{name}: the digests of {num_files} are recorded now, in {result.recorded_in}.")
        elif result.before is not None and result.findings:
            lines.append(f"{name}: no record is written, because it is damaged.")
        elif result.looked is not None and result.looked.recorded is not None and full:
            lines.append(f"{name}: compared with the digests recorded on {_date(result.looked.recorded.created_at)}.")
        elif result.compared_with == "checksums":
            lines.append(f"{name} has no digests: compared with the checksums that torch.save wrote.")
        if result.read is not None and result.read.num_without_checksum:
            count, of = result.read.num_without_checksum, result.read.num_items
            lines.append(f"{name}: {count} of {counted(of, 'item')} without a checksum, so not compared by value.")
        if result.read is not None and result.read.nan_in:
            lines.append(f"{name}: NaN is in {listed(result.read.nan_in)}.")
        if result.looked is not None and result.looked.unknown:
            lines.append(f"{name} has other files, too: {', '.join(result.looked.unknown[:_SHOWN_FILES])}.")
    return lines


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
