"""`verify`: is a checkpoint, or each one in a folder, what was saved?"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

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
from torchtitan_lite.cli.verify_result import DAMAGED, GONE, UNKNOWN, UNREADABLE, VerifyResult, rendered
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
from torchtitan_lite.examining.opened import absence, kind_from_keys
from torchtitan_lite.examining.presence import checkpoint_identity
from torchtitan_lite.examining.recorded_digests import (
    digests_path,
    read_record,
    states_of,
    take_digests,
    unwritable,
    write_record,
)
from torchtitan_lite.examining.verification import finding_of, look_at, read_through
from torchtitan_lite.examining.verified import FULL, SIZES, Verified, content_identity, record
from torchtitan_lite.store import layout
from torchtitan_lite.store.layout import Listing, is_checkpoint
from torchtitan_lite.store.place import Place, on_disk
from torchtitan_lite.store.store import CheckpointStore


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
    store, listing = CheckpointStore(root), Listing(root)
    abandoned: set[Place] = set()
    with contextlib.suppress(UnknownFormat):  # It is reported where that checkpoint is verified.
        abandoned = {info.path for info in store.intact()} - {info.path for info in store.committed()}
    places = [(step, paths[0]) for step, paths in listing.places().items() if paths[0].is_dir()]
    folders = [place for step, place in places if (store.root / place.name) not in abandoned and _is_one(place)]
    for path in of_other_libraries(root):
        if finding := _absence(path):
            screen.note(f"{path.name}: {finding}, so it is not verified")
        else:
            folders.append(path)
    for path in listing.leftovers():
        if layout.parse_staging(path.name) is not None:
            screen.note(f"{path.name}: a save is under way or was cut off, so it is not verified")
    if not folders:
        raise none_in(root, "there is no complete checkpoint in it")
    return folders, False


def _absence(path: Path) -> str:
    """Return why `path` is no complete checkpoint; one that cannot be listed is reported where it is read."""
    try:
        return absence(path) if path.is_dir() else ""
    except OSError:
        return ""


def _kept_places(address: SpeltAddress) -> list[Place]:
    """Return the checkpoints in the folder at `address`."""
    from torchtitan_lite.bucket.bucket_store import open_bucket  # Its client is an extra, and takes its time.

    store = open_bucket(str(address.folder))
    if not (kept := store.head().kept):
        raise CheckpointNotFound(store.address, None, finding="there is no complete checkpoint in it")
    return [store.place_of(entry.name) for entry in kept]


def _is_one(folder: Path) -> bool:
    """Return whether `folder` has files of a checkpoint; one that cannot be listed is reported where it is read."""
    try:
        return is_checkpoint(folder)
    except FileNotFoundError:
        return False  # A job has removed it.
    except OSError:
        return True


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
