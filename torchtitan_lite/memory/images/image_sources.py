"""The images that a start finds in memory, as sources of its load: one more kind next to the checkpoints on disk.

A load looks once, takes at most one copy, and then takes the memory over, or closes it. Between the images and what is
on disk a pure rule (snapshot_match.py) decides for each image, on the coordinator alone: here are the facts that it
needs, and what a load then takes. `FoundImages` accompanies a run, from the ids that all ranks agree on to the end of
the keeper: a start that makes no copies takes the images of the start before, and lets them go after its load.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.reading.files import Files, files_of
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder, Verify, complete_manifest
from torchtitan_lite.checkpoint.reading.source import LoadSource, RunFacts, Sources, Wanted
from torchtitan_lite.checkpoint.resume.load_source import with_exclusions
from torchtitan_lite.checkpoint.saving.companion import Companion
from torchtitan_lite.checkpoint.saving.target import Origin
from torchtitan_lite.checkpoint.schedule.interval import BEGINNING, Tick
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.disk.block_reader import DamagedRange
from torchtitan_lite.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from torchtitan_lite.events import ImageSkipped
from torchtitan_lite.log import counted, logger
from torchtitan_lite.memory.images.card import ImageKey, commit_of, commits_in, rests_in, same_contents
from torchtitan_lite.memory.images.held_images import Complete, HeldImages
from torchtitan_lite.memory.images.mapped_reader import FilesInMemory
from torchtitan_lite.memory.images.snapshot_match import OnDisk, why_not
from torchtitan_lite.memory.images.tier import TakenOver, Tier
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import CheckpointKind, Manifest
from torchtitan_lite.store.manifest_fields import CONFIG, START, TOPOLOGY, TRAINED_SECONDS
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

    def preferred(self, chosen: LoadSource | None, store: StoresCheckpoints, wanted: Wanted) -> LoadSource | None:
        return prefer_memory(self._held, store, chosen, wanted)

    def drop(self, source: LoadSource, error: CheckpointError) -> bool:
        if not isinstance(source, ImageSource):
            return False
        self._held.left_out.add(source.key)
        found = (getattr(error, name, "") for name in ("summary", "finding", "cause"))
        finding = next(filter(None, found), "") or str(error)
        if self._peers.is_coordinator:
            logger.warning(
                "The in-memory snapshot of step %d is not loaded: %s. Trying the next source", source.step, finding
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
                files.borrow(peers.gather(peers.together(lambda: lent_parts(source, files))))
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
            finding = f"this host has no memory for a snapshot from another host: {error}"
            raise CheckpointDamaged(str(source.path), finding) from None

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


class FoundImages(Companion):
    """The images that the start before left in `tier`, for a start that makes none."""

    keeps_copies = False
    """Whether copies of this start stay in memory for the next one."""

    def __init__(self, tier: Tier, store: StoresCheckpoints, context: RunContext) -> None:
        self.tier = tier
        self._sources = ImageSources(tier, context)
        self._store = store
        self._peers = context.peers

    def sources(self, others: Sources) -> Sources:
        """Return the images that are found: the first companion's, so there are no others yet."""
        return self._sources

    def begin(self, origin: Origin) -> Origin:
        start, folder_id, lineage = self._peers.on_coordinator(
            lambda: (uuid.uuid4().hex[:16], self._folder_id(), origin.lineage)
        )
        self.tier.begin(start, folder_id)
        if not folder_id or not self.keeps_copies:
            return origin
        return dataclasses.replace(origin, start=start, lineage=lineage)

    def loaded(self, source: LoadSource | None) -> None:
        """Take the memory over that the start before left, after a load of `source`. **Collective**.

        No image that may be needed is dropped before the keeper holds it under a name of this start.
        """
        taken = self._sources.taken_over(source)
        if self._peers.is_coordinator:
            try:
                self.tier.commits = commits_in(self._store)
            except (OSError, CheckpointError) as error:
                # The other ranks wait for this one in the next exchange.
                self.tier.commits, self.tier.is_off = (), True
                logger.warning("No in-memory snapshots: %s cannot be listed: %s", self._store.address, error)
        self._begin_keeping()
        if taken is None:
            return
        self.tier.replica_bytes = taken.replica_bytes
        self.use(taken)
        self._peers.gather(None)  # All ranks have adopted theirs.
        self.tier.drop_names(taken.names)

    def finished(self, run_id: str) -> None:
        self.tier.finish()

    def leave(self, seconds_left: Callable[[], float]) -> None:
        """Let the images outlive this process."""
        self.tier.leave()

    def _begin_keeping(self) -> None:
        """Start what keeps images: nothing, because this start makes none."""

    def use(self, taken: TakenOver) -> None:
        """Own what is `taken`: this start has no use for it. **Collective**."""
        for fd in [fd for pair in taken.arenas for fd in pair]:
            os.close(fd)

    def _folder_id(self) -> str:
        try:
            return self._store.folder_id(make=True)
        except OSError as error:
            logger.warning("No in-memory snapshots: the folder %s could get no id: %s", self._store.address, error)
            return ""


def _of_image(error: CheckpointMismatch, source: LoadSource, folder: str) -> CheckpointMismatch:
    """Return `error` about the image `source` of the folder `folder`, with the image's name and how to leave it out."""
    path = f"the in-memory snapshot of step {source.step}" if error.path == str(source.path) else error.path
    way_out = (
        f"  It was read from memory. To load from disk, or to begin from scratch if nothing is there, free it: "
        f"torchtitan-lite memory {shlex.quote(folder)} --end"
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
    with _as_damage_of_source(source):
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
    with _as_damage_of_source(source):
        return files.lend(few)


@contextmanager
def _as_damage_of_source(source: LoadSource) -> Iterator[None]:
    """Raise damage that the block finds as damage of `source`."""
    try:
        yield
    except DamagedRange as error:
        finding = f"bytes {error.begin} to {error.end} of {error.path.name}: {error.finding}"
        raise CheckpointDamaged(str(source.path), finding) from None


@dataclass(frozen=True, kw_only=True)
class ImageSource(LoadSource):
    """The images of one copy of the state, of all ranks."""

    key: ImageKey
    manifest: bytes
    """As the coordinator put it together."""
    is_spread: bool
    """Whether each rank has only the images of its own host."""
    is_last_resort: bool
    """Whether the disk has no full checkpoint of the run: then all of it is verified before anything is loaded."""
    is_copy: bool = False
    """Whether the disk has the same checkpoint."""
    durable: Tick
    """The latest step of the run that the disk has, with the seconds of training up to it; zeros for none."""

    @property
    def continues_at(self) -> int | None:
        # Where the run counts again, an image is of the new count.
        return None if self.initial and self.model_only else self.step

    @property
    def on_disk(self) -> Tick:
        return self.durable

    @property
    def is_proof(self) -> bool:
        return False

    @property
    def memory_step(self) -> int:
        return self.loaded.step

    @property
    def origin(self) -> str:
        return "memory"

    @property
    def remark(self) -> str:
        steps, seconds = self.at_risk
        lacking = f"; the disk lacks {counted(steps, 'step')} ({seconds:.1f} s of training)" if steps else ""
        return f" From memory: the snapshots of the previous start{lacking}"

    def verify(self, config: Checkpoint) -> Verify:
        return "full"  # Nothing but its digests shows that an image is complete.


def prefer_memory(
    images: HeldImages, store: StoresCheckpoints, chosen: LoadSource | None, wanted: Wanted
) -> LoadSource | None:
    """Return the source in memory that goes before `chosen`, which is what the disk has; else `chosen`."""
    if wanted.config.load_only or not images.complete:
        return chosen
    disk = _state_on_disk(store, chosen, wanted)
    for each in images.complete:
        if each.image.key in images.left_out:
            continue
        reason = why_not(each.image, disk) or _difference_from_disk(each, chosen)
        if not reason:
            return _memory_source(each, store, chosen, wanted.config)
        logger.info("The in-memory snapshot of step %d is not used: %s", each.image.key.step, reason)
    return chosen


def _state_on_disk(store: StoresCheckpoints, chosen: LoadSource | None, wanted: Wanted) -> OnDisk:
    latest = next((info for info in reversed(store.committed()) if info.kind is CheckpointKind.FULL), None)
    manifest = None if latest is None else files_of(latest.path).manifest()
    return OnDisk(
        folder_id=store.folder_id(make=False),
        latest=None if latest is None else commit_of(latest),
        latest_start="" if manifest is None else manifest.extra.get(START, ""),
        rests=rests_in(store),
        abandoned=frozenset(step for info in store.intact() for step, _ in info.lineage.abandons),
        wanted=wanted.step,
        is_exact=wanted.is_exact,
        new_branch=wanted.config.new_branch,
        chosen=None if chosen is None or chosen.initial else chosen,
    )


def _difference_from_disk(each: Complete, chosen: LoadSource | None) -> str:
    """Return why images of the step that is `chosen` on disk are no copy of it; empty for those of other steps."""
    if chosen is None or not _is_copy_of_disk(each, chosen):
        return ""
    try:
        manifest = complete_manifest(files_of(chosen.path), chosen.path)
        if manifest is not None and same_contents(manifest, each.manifest):
            return ""
    except (CheckpointError, OSError):
        pass
    return "that step on disk has other contents"


def _is_copy_of_disk(each: Complete, chosen: LoadSource) -> bool:
    """Return whether the images should be a copy of `chosen`: of the same step, unless the run counts again."""
    return not chosen.initial and not chosen.lineage.counts_again and chosen.step == each.image.key.step


def _memory_source(
    each: Complete, store: StoresCheckpoints, chosen: LoadSource | None, config: Checkpoint
) -> LoadSource:
    manifest, key = each.manifest, each.image.key
    has_other = chosen is not None and not chosen.model_only and not chosen.initial
    # Next to a run that counts again the disk would not restore all that a load changes.
    counts_again = chosen is not None and not chosen.initial and chosen.lineage.counts_again
    offered: dict[str, Any] = {
        "key": key,
        "manifest": manifest.to_json(),
        "is_spread": each.is_spread,
        "is_last_resort": not has_other or counts_again,
        "durable": BEGINNING if chosen is None else chosen.loaded,
    }
    if chosen is not None and _is_copy_of_disk(each, chosen):
        return ImageSource(**vars(chosen), **offered, is_copy=True)
    # The run continues as the one that made the image; its latest ancestor on disk is what the disk's choice loads.
    parent = None if chosen is None else chosen.lineage.parent_step
    lineage = dataclasses.replace(
        manifest.lineage,
        parent_step=parent,
        abandons=(),
        counts_again=counts_again,
        rolls_back_to=None if chosen is None else chosen.lineage.rolls_back_to,
    )
    source = ImageSource(
        store.place_of(layout.step_dir(key.step)),
        key.step,
        model_only=False,
        lineage=lineage,
        nbytes=manifest.nbytes,
        recorded=RunFacts(
            manifest.extra[TOPOLOGY], manifest.extra[CONFIG], trained_seconds=manifest.extra[TRAINED_SECONDS]
        ),
        **offered,
    )
    return with_exclusions(source, config)
