"""Uploads committed checkpoints of one folder into another one, one after another.

The other folder is held like that of a job, and a checkpoint appears there by the same commit: complete or not at all.
What is sent is what was committed: each block is verified as it is read. Files that were complete when an upload was
cut are not sent again. Retention removes in the other folder what it would remove in this one. One thread.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite import faults
from torchtitan_lite.disk.block_reader import BlockReader, DamagedRange
from torchtitan_lite.disk.block_writer import Bounced
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord, num_blocks
from torchtitan_lite.disk.helper import Rate
from torchtitan_lite.disk.plain_file import sizes_of
from torchtitan_lite.disk.read_requests import Piece
from torchtitan_lite.errors import CheckpointDamaged, CheckpointError, CheckpointUnreadable, SaveFailed, UploadRefused
from torchtitan_lite.events import Emit, Event, Uploaded, UploadFailed, ignore
from torchtitan_lite.log import logger, readable_bytes
from torchtitan_lite.store import layout
from torchtitan_lite.store.housekeeping import Housekeeping
from torchtitan_lite.store.manifest import CheckpointInfo, Manifest
from torchtitan_lite.store.place import on_disk
from torchtitan_lite.store.rank_records import RecordsOfRanks
from torchtitan_lite.store.retention import KeepAll, RetentionPolicy
from torchtitan_lite.store.rollbacks import joint_rollbacks
from torchtitan_lite.store.store import CheckpointStore, recover_with_log
from torchtitan_lite.stores import open_store, usable
from torchtitan_lite.uploading import record
from torchtitan_lite.uploading.choice import Save, is_of_another_run, lineage_in, missing, not_left, save_of
from torchtitan_lite.uploading.record import Begun, Record

_MOST_COMMITS = 3


@dataclass(frozen=True)
class UploadJob:
    """What to upload, whereto, and how."""

    folder: str
    """The folder of checkpoints on disk."""
    address: str
    """The other one: an address, or a folder on disk."""
    run_id: str = ""
    """The run that holds the other folder meanwhile."""
    retention: RetentionPolicy = dataclasses.field(default_factory=KeepAll)
    """Which checkpoints stay in the other folder."""
    max_bytes_per_second: float = 0.0
    """0: no limit."""
    lease_timeout_seconds: float = 30.0


@dataclass(frozen=True)
class State:
    """How it stands with the uploads of a folder."""

    stored: Save | None = None
    """The latest one in the other folder."""
    uploading: int | None = None
    """The step under way."""
    waiting: int = 0
    """Checkpoints that the other folder lacks, that one included."""
    sent_bytes: int = 0
    """In all uploads of this process."""
    new_bytes: int = 0
    """The same without what was sent again."""
    tried: int = 0
    """The last order to look for which a try has failed; counted by the trainer."""
    missing_bytes: int = 0
    """Of the checkpoints that wait."""
    problem: str = ""
    """Why nothing is uploaded; empty while uploads succeed."""
    is_refused: bool = False
    """Whether nothing will be uploaded any more."""
    is_lasting: bool = False
    """Whether the next try would meet the same problem, unless a person changes something."""


class Uploader:
    """Uploads as `job` says, and calls `report` with each change of the state, from the thread that uploads."""

    def __init__(
        self,
        job: UploadJob,
        report: Callable[[State], None],
        emit: Emit = ignore,
    ) -> None:
        self._job, self._report, self._emit = job, report, emit
        self._source, self._target = CheckpointStore(Path(job.folder)), open_store(job.address)
        self._lease = self._target.lease(job.run_id, job.lease_timeout_seconds)
        self._housekeeping = Housekeeping(job.retention, ignore, now=time.time, protected=self._source.pins.read)
        self._rate = Rate(job.max_bytes_per_second)
        self._record = Record(self.address)
        self._is_recorded = True
        """Whether the folder on disk takes the record; a disk that is full or read-only is to be rescued, too."""
        self._target_is_ours = False
        """Whether the other folder is known not to be another run's."""
        self._done_with: set[Save] = set()
        """Saves that this process does not send again: sent ones, and those that failed for a cause of theirs."""
        self._left: set[Save] = set()
        """The latter."""
        self._commits_failed: Counter[Save] = Counter()
        self._at = self._furthest = 0
        """Bytes of the upload under way, in this try and in the best one."""
        self._since: tuple[int, float, int] | None = None
        """The step under way, when it began, and the bytes that had been sent then."""
        self.failures = 0
        """Tries that failed since the last upload; the caller counts them."""
        self.state = State()

    @property
    def address(self) -> str:
        """The other folder, as people write it."""
        return self._target.address

    def say(self, **changes: object) -> None:
        """Change the state, and report."""
        self.state = dataclasses.replace(self.state, **changes)  # type: ignore[arg-type]  # fields of State
        self._report(self.state)

    def open(self) -> None:
        """Take the other folder. Raises FolderInUse, UploadRefused, FolderUnusable and OSError; it is not held then."""
        with usable(self._target.address):
            self._lease.take()
        try:
            self._look()
        except BaseException:
            self.close()
            raise

    def _look(self) -> None:
        """Find out how far the uploads are, and remove what was given up."""
        with usable(self._target.address):
            known = record.read(self._source.root, self.address)
            target = self._target.committed()
            source, folder_id = self._source.committed(), self._target.folder_id(make=True)
            if folder_id != known.folder_id:
                self._refuse_another_run(source, target)
                known = Record(self.address)
            self._target_is_ours = bool(source) or folder_id == known.folder_id
            self._record = dataclasses.replace(known, folder_id=folder_id)
            begun = self._record.begun
            if begun is None:
                recover_with_log(self._target)  # It would remove an upload that is to be continued.
            self._target.remove_cut("" if begun is None else begun.place)
        self._note_target(target)
        kept = {save_of(info) for info in (*not_left(source, target), *target)}
        if left := [str(info.step) for info in source if save_of(info) not in kept]:
            skipped = "Not uploaded, because a later checkpoint in %s abandons it: step %s"
            logger.warning(skipped, self.address, ", ".join(left))

    def _refuse_another_run(self, source: Sequence[CheckpointInfo], target: Sequence[CheckpointInfo]) -> None:
        if is_of_another_run(source, target):
            raise UploadRefused(self._target.address, f"it has checkpoints of another run, {target[-1].run_id}")

    def close(self) -> None:
        """Give the other folder up. Idempotent."""
        self._lease.release()

    def next(self) -> CheckpointInfo | None:
        """Return the checkpoint to upload now, None if the other folder has all. Raises UploadRefused."""
        target = self._target.committed()
        self._note_target(target)
        pinned = self._source.pins.read() | self._target.pins.read()
        source = self._source.committed()
        if not self._target_is_ours:
            # A run that has committed nothing is only now known for another one.
            self._refuse_another_run(source, target)
            self._target_is_ours = bool(source)
        lacking = missing(source, target, self._job.retention, pinned=pinned, now=time.time())
        left = [info for info in lacking if save_of(info) in self._left]
        lacking = [info for info in lacking if save_of(info) not in self._done_with]
        begun = self._record.begun
        if begun is not None and begun.save not in map(save_of, lacking):
            self._give_up(begun)
        # What has begun comes first: with a save each minute, uploads of ten would never end.
        lacking.sort(key=lambda info: begun is None or save_of(info) != begun.save)
        chosen = lacking[0] if lacking else None
        self.say(
            uploading=None if chosen is None else chosen.step,
            waiting=len(lacking) + len(left),
            missing_bytes=sum(info.nbytes for info in (*lacking, *left)),
            problem="",
            is_lasting=False,
        )
        return chosen

    def upload(self, info: CheckpointInfo) -> None:
        """Upload `info`. Raises LeaseLost, SaveFailed and the OSError of the other folder.

        Returns without having done so if the checkpoint was removed meanwhile, or proved damaged, which an event says.
        """
        if self._since is None or self._since[0] != info.step:
            self._since = info.step, time.monotonic(), self.state.sent_bytes
            self._furthest = 0
        _, began, sent_before = self._since
        try:
            self._send(info)
        except CheckpointDamaged as damage:
            if not self._is_there(info):
                return  # Another save of the step took its place.
            self._leave(info, damage)
            return
        except SaveFailed as error:
            # An answer may be lost. What fails again and again does not hold up the others.
            self._commits_failed[save_of(info)] += 1
            if self._commits_failed[save_of(info)] < _MOST_COMMITS:
                raise
            self._leave(info, error)
            return
        except FileNotFoundError:
            if self._is_there(info):
                raise
            return
        self._done_with.add(save_of(info))
        stored = {**self._record.stored, save_of(info): time.time()}
        self._write(dataclasses.replace(self._record, begun=None, stored=stored))
        self.say(uploading=None, stored=save_of(info))
        sent_bytes, seconds = self.state.sent_bytes - sent_before, time.monotonic() - began
        logger.info(
            "Uploaded step %d to %s: %s in %.1f s", info.step, self.address, readable_bytes(sent_bytes), seconds
        )
        failures, self.failures = self.failures, 0
        self._emit(Uploaded(info.step, path=self.address, bytes=sent_bytes, seconds=seconds, failures=failures))
        self._housekeeping.note_committed(info, self._target)
        self._housekeeping.purge(self._target)

    def _leave(self, info: CheckpointInfo, error: CheckpointError) -> None:
        """Leave `info` to the next start, and say so."""
        self._done_with.add(save_of(info))
        self._left.add(save_of(info))
        logger.warning("Step %d is not uploaded in this start: %s", info.step, error)
        self._emit(UploadFailed(info.step, path=self.address, reason=str(error)))

    def _send(self, info: CheckpointInfo) -> None:
        folder = on_disk(info.path)
        manifest, files = committed_files(folder)
        begun = self._begun(info, files)
        self._at = sum(begun.done.values())
        for name, known in manifest.files.items():
            faults.point("upload", step=info.step)
            if self._target.root is not None:
                self._lease.check()  # In a bucket no other job writes under this name, and the commit finds out.
            if begun.done.get(name) != known.size:
                source = StoredFile(folder / name, files[name], self._pass)
                self._target.send(begun.place, name, source)
            if self._target.root is not None:
                begun = dataclasses.replace(begun, done={**begun.done, name: known.size})
                self._write(dataclasses.replace(self._record, begun=begun))
        if not self._is_there(info):
            raise FileNotFoundError(str(folder))
        self._send_rollbacks()
        lineage = lineage_in(self._target.intact(), manifest.lineage)
        manifest = dataclasses.replace(manifest, lineage=lineage)
        self._target.commit(info.step, manifest, place=begun.place)

    def _send_rollbacks(self) -> None:
        """Have the other folder's record of rollbacks hold those of this one: a start with an empty disk skips them."""
        if found := self._source.rollbacks.read():
            there = self._target.rollbacks.read()
            if (new := joint_rollbacks(found, there)) != there:
                self._lease.check()
                self._target.rollbacks.write(new)

    def _is_there(self, info: CheckpointInfo) -> bool:
        """Return whether the folder on disk has this very save still."""
        return save_of(info) in map(save_of, self._source.committed())

    def _begun(self, info: CheckpointInfo, files: Mapping[str, FileRecord]) -> Begun:
        """Return the upload of `info` that was cut, with those of its `files` that are complete; else a new one."""
        begun = self._record.begun
        if begun is not None and begun.save == save_of(info):
            there = self._target.resume(info.step, begun.place)
            if there is not None:
                known = there if self._target.root is None else begun.done
                done = {name: size for name, size in known.items() if there.get(name) == size and name in files}
                if self._target.root is not None:
                    # Another run may have had a file of that name there since.
                    place = on_disk(self._target.place_of(begun.place))
                    done = {name: size for name, size in done.items() if _has_contents(place / name, files[name])}
                    for name in there.keys() - done.keys():
                        (place / name).unlink()  # Nothing is written into a file that is there.
                return dataclasses.replace(begun, done=done)
        begun = Begun(save_of(info), self._target.begin(info.step))
        self._write(dataclasses.replace(self._record, begun=begun))
        return begun

    def _give_up(self, begun: Begun) -> None:
        """Remove what was sent of an upload that is not wanted any more; what is complete there stays."""
        if begun.place.startswith(layout.step_dir(begun.save[0])):
            self._target.remove_staging(begun.save[0], begun.place)
        self._target.remove_cut("")
        self._write(dataclasses.replace(self._record, begun=None))

    def _pass(self, num_bytes: int) -> None:
        self._rate.wait_for(num_bytes)
        self._at += num_bytes
        new = max(0, self._at - self._furthest)
        self._furthest += new
        self.say(sent_bytes=self.state.sent_bytes + num_bytes, new_bytes=self.state.new_bytes + new)

    def _note_target(self, target: list[CheckpointInfo]) -> None:
        known, now = self._record.stored, time.time()
        stored = {save_of(info): known.get(save_of(info), now) for info in target}
        if stored != known:
            self._write(dataclasses.replace(self._record, stored=stored))
        self.say(stored=save_of(target[-1]) if target else None)

    def _write(self, new: Record) -> None:
        self._record = new
        try:
            record.write_record(self._source.root, new)
        except BlockingIOError:
            raise  # Another process has the folder for a moment.
        except OSError as error:
            if self._is_recorded:
                logger.warning(
                    "The progress of uploads to %s cannot be written into %s: %s. An interrupted upload starts again",
                    self.address,
                    self._source.address,
                    error,
                )
            self._is_recorded = False


def _has_contents(path: Path, known: FileRecord) -> bool:
    """Return whether the file `path` has the contents of the record `known`."""
    try:
        BlockReader(threads=1).verify(path, known, range(num_blocks(known.size)))
    except (DamagedRange, CheckpointUnreadable):
        return False
    return True


def upload_all(job: UploadJob, report: Callable[[State], None]) -> int:
    """Upload what the other folder of `job` lacks, and return how many checkpoints that were. Raises as `Uploader`."""
    failures: list[Event] = []
    uploader, count = Uploader(job, report, failures.append), 0
    uploader.open()
    try:
        while (info := uploader.next()) is not None:
            uploader.upload(info)
            count += uploader.state.uploading is None
    finally:
        uploader.close()
    if damaged := [event.reason for event in failures if isinstance(event, UploadFailed)]:
        raise CheckpointError(damaged[0])
    return count


class StoredFile(Bounced):
    """The contents of the file `path`, whose `record` is known; `wait_for` is called with the bytes of each read.

    Each block is verified before it is sent. Reading raises CheckpointDamaged for a block that has another digest, and
    for a file that is gone or cannot be read: an OSError is one of the folder that it goes to.
    """

    request_bytes = 8 * BLOCK_BYTES
    threads = 1

    def __init__(self, path: Path, record: FileRecord, wait_for: Callable[[int], None]) -> None:
        reader = BlockReader(threads=1)

        def fill(buffer: memoryview, begin: int, end: int) -> None:
            wait_for(end - begin)
            try:
                reader.read(path, record, [Piece(begin, buffer[: end - begin])])
            except (DamagedRange, CheckpointUnreadable) as error:
                where = f"bytes {error.begin} to {error.end}: " if isinstance(error, DamagedRange) else ""
                finding = where + (error.finding if isinstance(error, DamagedRange) else error.cause)
                raise CheckpointDamaged(str(path.parent), f"{path.name}: {finding}") from None

        super().__init__(record.size, fill)
        self.record = record


def committed_files(folder: Path) -> tuple[Manifest, Mapping[str, FileRecord]]:
    """Return the manifest of the checkpoint in `folder` and the record of each file. Raises FileNotFoundError."""
    if (manifest := Manifest.of_folder(folder)) is None:
        raise FileNotFoundError(str(folder))
    records = RecordsOfRanks(
        manifest, str(folder), BlockReader(), lambda name: folder / name, lambda names: sizes_of(folder, names)
    )
    return manifest, records
