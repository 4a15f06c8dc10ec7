"""What the manifests in a folder of checkpoints say, each read once.

A checkpoint counts by its own manifest alone: its name must be that of its step, and it must be a folder, not a link to
one. A manifest is remembered with the identity of its file (device, inode, size, times) and read again only when
another file has its name; of one that this process wrote, what was written is known, and no byte of it is parsed. The
process that writes the folder need not even look, so that a save next to a thousand checkpoints takes no longer than
one next to ten. A manifest that the system cannot read is neither intact nor damaged:
a caller who needs it gets the error, all others one warning. Any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from torchtitan_lite import faults
from torchtitan_lite.disk.plain_file import read_plain, size_finding
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnreadable, CheckpointUnsafe
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.files_of_ranks import recorded_sizes
from torchtitan_lite.store.layout import Listing, is_folder
from torchtitan_lite.store.manifest import CheckpointInfo, Manifest, has_digest, last_digest_of
from torchtitan_lite.store.manifest_fields import METRICS, NAN_IN, NEVER_FINITE, RANKS_DIFFER
from torchtitan_lite.store.place import Place, on_disk

SETTLED_NS = 50_000_000
"""A file changed more recently may change again with the same time: a tick of the kernel takes 10 ms."""

Identity = tuple[int, ...]


@dataclass(frozen=True)
class _Known:
    identity: Identity
    is_settled: bool
    """Whether any later change of the file would change its identity."""
    info: CheckpointInfo | CheckpointDamaged
    sizes: Mapping[str, int]
    digest: str = ""
    """In its last line, if this process wrote it: while the file is not settled, its bytes are compared with it."""

    def sound_info(self) -> CheckpointInfo:
        """Return what the manifest says. Raises `CheckpointDamaged`."""
        if isinstance(self.info, CheckpointDamaged):
            raise CheckpointDamaged(self.info.path, self.info.finding)
        return self.info


class Manifests:
    """The manifests that were read in a folder of checkpoints."""

    def __init__(self) -> None:
        self._warned: dict[str, str] = {}
        """The cause that was logged last of what could not be read, by its address."""

    def if_intact(self, find: Callable[[], CheckpointInfo | None]) -> CheckpointInfo | None:
        """Return the same as `find`, but None for damage, and None with a warning for what could not be read."""
        try:
            return find()
        except CheckpointDamaged:
            return None
        except CheckpointUnreadable as error:
            if self._warned.get(error.path) != error.cause:
                self._warned[error.path] = error.cause
                unread = "%s could not be read, so retention neither counts nor removes it: %s"
                logger.warning(unread, error.path, error.cause)
            return None


class KnownManifests(Manifests):
    """The manifests that were read in `root`. `now_ns` is the clock of file times, as far as known."""

    def __init__(self, root: Path, now_ns: Callable[[], int] = time.time_ns) -> None:
        super().__init__()
        self._root = root
        self._now_ns = now_ns
        self._known: dict[Path, _Known] = {}
        self._is_writer = False
        self._listed: dict[str, CheckpointInfo] | None = None
        """The intact checkpoints by name, for the writer; None if not all are known."""

    def note_commit(self, folder: Path, manifest: Manifest, text: bytes) -> CheckpointInfo:
        """Note that this process has committed `folder`, so that no other one renames anything here; return what it is.

        `text` is what it wrote of `manifest`.
        """
        info = checkpoint_info(folder, manifest)
        self._is_writer = True
        if self._listed is not None:
            self._listed[folder.name] = info
        with suppress(OSError):  # Then the next look finds what is wrong.
            identity = manifest_identity(folder)
            settled = _is_settled(identity, self._now_ns())
            sizes, digest = recorded_sizes(manifest.files), last_digest_of(text)
            self._known[folder] = _Known(identity, settled, info, sizes, digest)
        return info

    def find(self, step: int, places: Sequence[Path]) -> CheckpointInfo | None:
        """Return the first intact checkpoint of `step` in `places`; None if there is no checkpoint.

        If there are checkpoints and none is intact, raises `CheckpointUnreadable` for the first that could not be read,
        else `CheckpointDamaged`. Raises `FormatTooNew` for a newer format.
        """
        found: list[CheckpointDamaged | CheckpointUnreadable] = []
        for folder in places:
            try:
                if (known := self._read(folder, step)) is not None:
                    return known.sound_info()
            except (CheckpointDamaged, CheckpointUnreadable) as error:
                found.append(error)
        # An I/O error outweighs damage, which may be another symptom of the same failure.
        if worst := sorted(found, key=lambda error: isinstance(error, CheckpointDamaged)):
            raise worst[0]
        return None

    def find_intact(self, step: int, places: Sequence[Path]) -> CheckpointInfo | None:
        """Return the same as `find`, as `if_intact` does."""
        return self.if_intact(lambda: self.find(step, places))

    def intact(self) -> list[CheckpointInfo]:
        """Return every intact checkpoint in the folder, by ascending step."""
        listing = Listing(self._root)
        return self._found(listing, listing.committed_steps(), {})

    def listed(self) -> list[CheckpointInfo]:
        """Return the same as `intact`, without a look at what this process has found intact under the same name.

        For the writer of the folder: no other process gives a name to another checkpoint.
        """
        if self._listed is None:
            return self.intact()
        listing = Listing(self._root)
        known = {name: self._listed[name] for name in listing.names if name in self._listed}
        return self._found(listing, listing.committed_steps(without=known.keys()), known)

    def may_be_abandoned(self, step: int, run_id: str) -> bool:
        """Return whether an intact checkpoint may abandon this one, as far as is known without a look."""
        return self._listed is None or any((step, run_id) in info.lineage.abandons for info in self._listed.values())

    def _found(self, listing: Listing, steps: Sequence[int], known: dict[str, CheckpointInfo]) -> list[CheckpointInfo]:
        """Return what is `known`, by name, and what is intact of `steps`, by ascending step."""
        looked_at = [self.find_intact(step, listing.places_of(step)) for step in steps]
        known |= {on_disk(info.path).name: info for info in looked_at if info is not None}
        # What was replaced, and is all there is of a step, has its name for a moment only.
        self._listed = known if self._is_writer and not any(map(layout.parse_replaced, listing.hidden)) else None
        self._forget_purged(listing)
        return sorted(known.values(), key=attrgetter("step"))

    def errors_by_step(self, above: int) -> dict[int, CheckpointDamaged | CheckpointUnreadable]:
        """Return what is wrong with each step higher than `above` that has checkpoints but no intact one, by step."""
        found: dict[int, CheckpointDamaged | CheckpointUnreadable] = {}
        for step, places in Listing(self._root).places().items():
            try:
                if step > above:
                    self.find(step, places)
            except (CheckpointDamaged, CheckpointUnreadable) as error:
                found[step] = error
        return found

    def check_sizes(self, info: CheckpointInfo) -> list[str]:
        """Return what is wrong with the sizes of the files of `info`, one sentence each; empty if nothing is."""
        try:
            if (known := self._read(on_disk(info.path), info.step)) is None:
                return [f"{layout.MANIFEST} is missing"]
            known.sound_info()
            findings = [size_finding(on_disk(info.path) / name, size) for name, size in sorted(known.sizes.items())]
        except CheckpointDamaged as error:
            return [error.finding]
        except OSError as error:
            raise CheckpointUnreadable(str(info.path), f"{type(error).__name__}: {error}") from error
        return [finding for finding in findings if finding]

    def _forget_purged(self, listing: Listing) -> None:
        """Forget the manifests of what is gone, now and then: the table would keep each step that was ever purged."""
        if len(self._known) > 2 * len(names := {*listing.names}):
            for folder in list(self._known):
                if folder.name not in names:
                    self._known.pop(folder, None)

    def _read(self, folder: Path, step: int) -> _Known | None:
        """Return what is known of `folder` by now; None if it has no manifest."""
        try:
            if not is_folder(folder):
                return None
            faults.point("listing", step=step, path=folder / layout.MANIFEST)
            # Before the file is read: if it is replaced in between, the next look sees another identity and reads
            # again.
            identity = manifest_identity(folder)
            known, now_ns = self._known.get(folder), self._now_ns()
            if known is None or known.identity != identity:
                known = _look_into(folder, step, identity, now_ns)
            elif not known.is_settled:
                known = _as_written(folder, known, now_ns) or _look_into(folder, step, identity, now_ns)
        except (FileNotFoundError, NotADirectoryError):
            known = None
        except OSError as error:
            raise CheckpointUnreadable(str(folder), f"{type(error).__name__}: {error}") from error
        if known is None:
            self._known.pop(folder, None)
        else:
            self._known[folder] = known
        self._warned.pop(str(folder), None)
        return known


def manifest_identity(folder: Path) -> Identity:
    """Return the identity of the manifest in `folder`; no other file has the same."""
    found = (folder / layout.MANIFEST).lstat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def checkpoint_info(folder: Place, manifest: Manifest) -> CheckpointInfo:
    """Return what `manifest` says of the checkpoint in `folder`."""
    return CheckpointInfo(
        manifest.step,
        folder,
        manifest.kind,
        manifest.created_at,
        manifest.nbytes,
        manifest.lineage,
        has_nan=bool(manifest.extra.get(NAN_IN)),
        ranks_differ=bool(manifest.extra.get(RANKS_DIFFER)),
        never_finite=(*map(str, manifest.extra.get(NEVER_FINITE, ())),),
        metrics=manifest.extra.get(METRICS, {}),
    )


def damage_in(folder: Place, error: CheckpointUnsafe) -> CheckpointDamaged:
    """Return `error`, about `folder` or a file in it, as damage of the checkpoint in `folder`."""
    path = Path(error.path)
    return CheckpointDamaged(
        str(folder), error.finding if error.path == str(folder) else f"{path.name}: {error.finding}"
    )


def _is_settled(identity: Identity, now_ns: int) -> bool:
    return now_ns - max(identity[-2:]) > SETTLED_NS


def _as_written(folder: Path, known: _Known, now_ns: int) -> _Known | None:
    """Return what is `known` of `folder`, if this process wrote its manifest and that has the same bytes still."""
    if not known.digest:
        return None
    try:
        data = read_plain(folder / layout.MANIFEST, limit=known.identity[2])
    except CheckpointUnsafe:
        return None
    settled = _is_settled(known.identity, now_ns)
    return replace(known, is_settled=settled) if has_digest(data, known.digest) else None


def _look_into(folder: Path, step: int, identity: Identity, now_ns: int) -> _Known | None:
    settled = _is_settled(identity, now_ns)
    try:
        manifest = manifest_in(folder, step)
    except CheckpointDamaged as error:
        return _Known(identity, settled, error, {})
    if manifest is None:
        return None
    return _Known(identity, settled, checkpoint_info(folder, manifest), recorded_sizes(manifest.files))


def manifest_in(folder: Path, step: int) -> Manifest | None:
    """Return the manifest of `step` in `folder`; None if there is none. Raise `CheckpointDamaged` for another one.

    Raises as `Manifest.of_folder` else.
    """
    try:
        manifest = Manifest.of_folder(folder)
    except CheckpointUnsafe as error:
        raise damage_in(folder, error) from error
    if manifest is not None and manifest.step != step:
        raise CheckpointDamaged(str(folder), f"{layout.MANIFEST}: it is the manifest of step {manifest.step}")
    return manifest
