"""The images that a start finds in memory, as sources of its load: one more kind next to the checkpoints on disk.

A load looks once, takes at most one copy, and then takes the memory over, or closes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.images.files import FilesInMemory
from torchtitan_lite.checkpoint.images.from_memory import prefer_memory
from torchtitan_lite.checkpoint.images.held_images import HeldImages
from torchtitan_lite.checkpoint.images.image_source import ImageSource
from torchtitan_lite.checkpoint.images.tier import TakenOver, Tier
from torchtitan_lite.checkpoint.reading.files import Files
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.checkpoint.reading.source import Choose, LoadSource, Sources
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.disk.block_reader import DamagedRange
from torchtitan_lite.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from torchtitan_lite.events import ImageSkipped
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import Manifest
from torchtitan_lite.store.protocol import StoresCheckpoints


class ImageSources(Sources):
    """What the keepers of all hosts hold for the run of `tier`."""

    def __init__(self, tier: Tier, context: RunContext) -> None:
        self._tier = tier
        self._peers = context.peers
        self._emit = context.emit
        self._held = HeldImages(None, "", context.peers)

    def look(self, topology: str) -> None:
        keeper = None if self._tier.is_off else self._tier.keeper
        self._held = HeldImages(keeper, self._tier.start, self._peers)
        self._held.look(topology=topology)

    def preferred(
        self,
        chosen: LoadSource | None,
        store: StoresCheckpoints,
        wanted: int,
        config: Checkpoint,
        *,
        is_exact: bool,
        choose: Choose,
    ) -> LoadSource | None:
        return prefer_memory(self._held, store, chosen, wanted, config, is_exact=is_exact)

    def drop(self, source: LoadSource, error: CheckpointError) -> bool:
        if not isinstance(source, ImageSource):
            return False
        self._held.left_out.add(source.key)
        found = (getattr(error, name, "") for name in ("summary", "finding", "cause"))
        finding = next(filter(None, found), "") or str(error)
        if self._peers.is_coordinator:
            logger.warning(
                "The image of step %d in memory is not loaded: %s. Trying what is next", source.step, finding
            )
        self._emit(ImageSkipped(source.step, finding=finding))
        return True

    @contextmanager
    def opened(self, source: LoadSource, folder: str) -> Iterator[Files | None]:
        """Yield the files of the images on this host; they are unmapped after the block."""
        if not isinstance(source, ImageSource):
            yield None
            return
        peers = self._peers
        manifest = Manifest.parse(source.manifest, f"{source.path}/{layout.MANIFEST}")
        if source.is_spread:
            self._fetch(source)
        files = self._held.files(source.key, manifest, is_spread=source.is_spread)
        try:
            if source.is_spread:
                files.borrow(peers.gather_made(lambda: lent_parts(source, files)))
            if source.is_last_resort:
                # What a load has changed, nothing on disk could put right.
                peers.together(lambda: verify_images(source, files, peers.rank, peers.world_size))
            yield files
        except CheckpointMismatch as error:
            if source.is_copy:
                raise  # The step on disk does not fit either.
            raise _of_image(error, source, folder) from None
        finally:
            files.close()

    def _fetch(self, source: ImageSource) -> None:
        try:
            self._held.fetch(source.key)
        except OSError as error:
            raise CheckpointDamaged(str(source.path), f"an image of another host has no room here: {error}") from None

    def taken_over(self, source: LoadSource | None) -> TakenOver | None:
        """Return what this rank takes over from the start before, after a load of `source`; None for nothing.

        The caller owns the descriptors. The same on every rank whether it is None.
        """
        held, self._held = self._held, HeldImages(None, "", self._peers)
        if not held.are_any:
            return None
        return held.shared_out(source.key if isinstance(source, ImageSource) else None)

    def close(self) -> None:
        """Close the images: no load takes them over. The keeper has them for the next start."""
        self._held.close()
        self._held = HeldImages(None, "", self._peers)


def _of_image(error: CheckpointMismatch, source: LoadSource, folder: str) -> CheckpointMismatch:
    """Return `error` about the image `source` of the folder `folder`, with the image's name and how to leave it out."""
    path = f"the image of step {source.step} in memory" if error.path == str(source.path) else error.path
    way_out = (
        f"  It was read from memory. To load from disk, or to begin from scratch if nothing is there, free it: "
        f"torchtitan-lite memory {folder} --end"
    )
    named = CheckpointMismatch(path, f"{error.report}\n{way_out}")
    named.origin_rank, named.reported_elsewhere = error.origin_rank, error.reported_elsewhere
    return named


MOST_BYTES = 1 << 20
"""Of one tensor or object that is lent."""
MOST_BYTES_OF_A_RANK = 64 << 20
"""Of all together. A rank with more lends nothing: replicated weights come from the disk."""


def verify_images(source: LoadSource, files: FilesInMemory, number: int, count: int) -> None:
    """Verify every byte of this rank's share of `files`. Raise `CheckpointDamaged`."""
    with _findings(source):
        files.verify(number, count)


def lent_parts(source: LoadSource, files: FilesInMemory) -> dict[str, dict[int, bytes]]:
    """Return what this rank lends: the small whole tensors and objects of its own file. Raise `CheckpointDamaged`."""
    contents = CheckpointFolder(source.path, files=files).contents
    ranges: dict[str, list[tuple[int, int]]] = {}
    for kind, places in contents.table.places_by_kind.items():
        if 0 < kind.nbytes <= MOST_BYTES:
            ranges.setdefault(kind.file, []).extend((at, kind.nbytes) for at in places)
    for stored in contents.objects.values():
        if stored.item is not None and 0 < stored.item.length <= MOST_BYTES:
            ranges.setdefault(stored.item.file, []).append((stored.item.offset, stored.item.length))
    few = {file: parts for file, parts in ranges.items() if sum(count for _, count in parts) <= MOST_BYTES_OF_A_RANK}
    with _findings(source):
        return files.lend(few)


@contextmanager
def _findings(source: LoadSource) -> Iterator[None]:
    """Raise damage that the block finds as damage of `source`."""
    try:
        yield
    except DamagedRange as error:
        finding = f"bytes {error.begin} to {error.end} of {error.path.name}: {error.finding}"
        raise CheckpointDamaged(str(source.path), finding) from None
