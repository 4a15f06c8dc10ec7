"""What the manifests in a folder of checkpoints say, each read once.

A checkpoint counts by its own manifest alone: its name must be its step's, and it must be a folder, not
a link to one. What was read is remembered with the identity of the file (device, inode, size, times),
and read again only where another file has its name, so a commit beside a hundred kept checkpoints looks
at a hundred files and opens none. A manifest that the system does not give is neither intact nor
damaged: who needs it is given the error, and for all others it is one warning. Any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite import faults
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnreadable, CheckpointUnsafe
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.listing import Listing, is_folder
from torchtitan_lite.store.manifest import CheckpointInfo, Manifest
from torchtitan_lite.store.manifest_fields import NAN_IN

SETTLED_NS = 50_000_000
"""A file that was changed less long ago may be changed again without another time: a tick of the kernel takes 10 ms."""

Identity = tuple[int, ...]


@dataclass(frozen=True)
class _Known:
    identity: Identity
    is_settled: bool
    """Whether a later change of the file would be one of its identity."""
    info: CheckpointInfo | CheckpointDamaged
    sizes: Mapping[str, int]


class KnownManifests:
    """The manifests that were read in `root`. `now_ns` is the clock that file times come from, as far as known."""

    def __init__(self, root: Path, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._root = root
        self._now_ns = now_ns
        self._known: dict[Path, _Known] = {}
        self._warned: dict[Path, str] = {}

    def find(self, step: int, places: Sequence[Path]) -> CheckpointInfo | None:
        """The first intact checkpoint of `step` in `places`.

        Where there is none, raises `CheckpointUnreadable` for the first that the system does not give, else
        `CheckpointDamaged`, or `FormatTooNew`.
        """
        found: list[CheckpointDamaged | CheckpointUnreadable] = []
        for folder in places:
            try:
                info = self._inspect(folder, step)
            except (CheckpointDamaged, CheckpointUnreadable) as error:
                found.append(error)
            else:
                if info is not None:
                    return info
        # An error of the machine outweighs damage: it may be the other side of the same failure.
        if worst := sorted(found, key=lambda error: isinstance(error, CheckpointDamaged)):
            raise worst[0]
        return None

    def find_intact(self, step: int, places: Sequence[Path]) -> CheckpointInfo | None:
        """As `find`; damage, and what the system does not give, are as good as nothing."""
        try:
            return self.find(step, places)
        except CheckpointDamaged:
            return None
        except CheckpointUnreadable as error:
            self._warn(error)
            return None

    def intact(self) -> list[CheckpointInfo]:
        """Every intact checkpoint in the folder, by ascending step."""
        all_places = Listing(self._root).places()
        self._forget_all_but({place for places in all_places.values() for place in places})
        found = (self.find_intact(step, places) for step, places in all_places.items())
        return [info for info in found if info is not None]

    def faults(self) -> dict[int, CheckpointDamaged | CheckpointUnreadable]:
        """What is wrong with each step-N that has no intact manifest, by step."""
        found: dict[int, CheckpointDamaged | CheckpointUnreadable] = {}
        for step, places in Listing(self._root).places().items():
            try:
                self.find(step, places)
            except (CheckpointDamaged, CheckpointUnreadable) as error:
                found[step] = error
        return found

    def sizes(self, info: CheckpointInfo) -> Mapping[str, int]:
        """The sizes in bytes of the files of `info`, by name, as its manifest has them. Raises as `find` does.

        Raises `CheckpointDamaged` too where the manifest is not there any more.
        """
        known = self._read(info.path, info.step)
        if known is None:
            raise CheckpointDamaged(str(info.path), f"{layout.MANIFEST} is missing")
        _raise_damage(known)
        return known.sizes

    def _forget_all_but(self, places: Collection[Path]) -> None:
        """Nothing is remembered of other places."""
        for folder in list(self._known):
            if folder not in places:
                self._known.pop(folder, None)

    def _inspect(self, folder: Path, step: int) -> CheckpointInfo | None:
        known = self._read(folder, step)
        if known is None:
            return None
        _raise_damage(known)
        assert isinstance(known.info, CheckpointInfo), "what is not damaged is described"
        return known.info

    def _read(self, folder: Path, step: int) -> _Known | None:
        """What is known of `folder`, by now; None if there is no manifest in it."""
        try:
            if not is_folder(folder):
                return None
            faults.point("listing", step=step, path=folder / layout.MANIFEST)
            identity = identity_of(folder)
            known = self._known.get(folder)
            if known is None or known.identity != identity or not known.is_settled:
                known = _look_into(folder, step, identity, self._now_ns())
        except (FileNotFoundError, NotADirectoryError):
            known = None
        except OSError as error:
            raise CheckpointUnreadable(str(folder), f"{type(error).__name__}: {error}") from error
        if known is None:
            self._known.pop(folder, None)
        else:
            self._known[folder] = known
        self._warned.pop(folder, None)
        return known

    def _warn(self, error: CheckpointUnreadable) -> None:
        folder = Path(error.path)
        if self._warned.get(folder) != error.cause:
            self._warned[folder] = error.cause
            logger.warning("%s is not looked at, and neither counted nor removed: %s", folder, error.cause)


def identity_of(folder: Path) -> Identity:
    """Return what another manifest in `folder` would not have the same."""
    found = (folder / layout.MANIFEST).lstat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def describe(folder: Path, manifest: Manifest) -> CheckpointInfo:
    """What `manifest` says of the checkpoint in `folder`."""
    return CheckpointInfo(
        manifest.step,
        folder,
        manifest.kind,
        manifest.created_at,
        manifest.nbytes,
        manifest.lineage,
        has_nan=bool(manifest.extra.get(NAN_IN)),
    )


def damage_in(folder: Path, error: CheckpointUnsafe) -> CheckpointDamaged:
    """Return that the checkpoint in `folder` is damaged: `error`, which concerns the folder or a file of it."""
    path = Path(error.path)
    return CheckpointDamaged(str(folder), error.finding if path == folder else f"{path.name}: {error.finding}")


def _raise_damage(known: _Known) -> None:
    if isinstance(known.info, CheckpointDamaged):
        raise CheckpointDamaged(known.info.path, known.info.finding)


def _look_into(folder: Path, step: int, identity: Identity, now_ns: int) -> _Known | None:
    settled = now_ns - max(identity[-2:]) > SETTLED_NS
    try:
        manifest = Manifest.of_folder(folder)
    except CheckpointDamaged as error:
        return _Known(identity, settled, error, {})
    except CheckpointUnsafe as error:
        return _Known(identity, settled, damage_in(folder, error), {})
    if manifest is None:
        return None
    if manifest.step != step:
        found = CheckpointDamaged(str(folder), f"{layout.MANIFEST}: it is the manifest of step {manifest.step}")
        return _Known(identity, settled, found, {})
    sizes = {name: record.size for name, record in manifest.files.items()}
    return _Known(identity, settled, describe(folder, manifest), sizes)
