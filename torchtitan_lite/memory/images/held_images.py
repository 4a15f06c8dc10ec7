"""The images that the keepers of all hosts hold when a load begins, and the one that it takes, if any.

Every rank looks at its own host, once a load, and the ranks exchange what they found. The coordinator decides, as it
does among the steps on disk: the highest step that is complete over all hosts and belongs to the run, memory before
disk at the same step. What is no image of ours, or damaged, is ignored with one line.

An image that a rank lacks on its host and another host has comes through the process group of the job. So a host that
was replaced gets its part from the replicas at its neighbour, and ranks that are on other hosts than before get theirs
from those.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from torchtitan_lite.checkpoint.staging.mark import PAGE_BYTES, Mark, Marked, UnusableMark, read_mark
from torchtitan_lite.disk.block_reader import DamagedRange
from torchtitan_lite.disk.digest import num_blocks
from torchtitan_lite.disk.shared_memory import map_shared
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import KeeperUnavailable
from torchtitan_lite.log import counted, logger, readable_bytes
from torchtitan_lite.memory.images.card import Card, ImageKey, assembled_manifest
from torchtitan_lite.memory.images.mapped_reader import FilesInMemory, MappedReader
from torchtitan_lite.memory.images.snapshot_match import ImageFacts, is_replica
from torchtitan_lite.memory.images.tier import TakenOver
from torchtitan_lite.memory.keeper.client import HeldMemory, Keeper
from torchtitan_lite.store.manifest import Manifest

END_SECONDS = 10.0
"""How long the processes of the start before may take to end: a launcher kills them before it starts others."""

MOST_SPARE = 3
"""Arenas without a useful image that a rank takes over: it has no more itself."""
_GET_SEALS = 1034
_BAD_SEALS = 0x2 | 0x4 | 0x8 | 0x10
"""F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE and F_SEAL_FUTURE_WRITE."""


class Look(NamedTuple):
    """What one rank found."""

    host: tuple[str, ...]
    """The names of all that its keeper holds: the same on the ranks of one host, and on no other."""
    images: Sequence[ImageFacts]


@dataclass(frozen=True)
class _Local:
    held: HeldMemory
    image: ImageFacts
    card: Card


@dataclass(frozen=True)
class Complete:
    """Images of all ranks: the coordinator's view."""

    image: ImageFacts
    """Rank 0's."""
    manifest: Manifest
    is_spread: bool
    """Whether each rank has only the images of its own host."""


@dataclass
class HeldImages:
    """The images in `keeper` that a start with the id `start` may load; `keeper` is None if this rank cannot."""

    keeper: Keeper | None
    start: str
    peers: Peers
    complete: list[Complete] = field(default_factory=list, init=False)
    """By descending step; coordinator only."""
    left_out: set[ImageKey] = field(default_factory=set, init=False)
    """Those that proved damaged; the same on every rank."""
    _held: list[HeldMemory] = field(default_factory=list, init=False)
    """Each memory once."""
    _more_names: dict[str, list[str]] = field(default_factory=dict, init=False)
    """The other names of the same memory, by the name of the one in `_held`."""
    _local: dict[tuple[ImageKey, int], _Local] = field(default_factory=dict, init=False)
    _looks: Sequence[Look] = field(default=(), init=False)
    _fetched: list[tuple[ImageKey, HeldMemory]] = field(default_factory=list, init=False)
    """What this rank received of other hosts, which no keeper holds yet."""

    def look(self, *, topology: str) -> None:
        """Find the images on all hosts that fit together, for a run of `topology`. **Collective**."""
        self.peers.together(self._list)
        host = tuple(sorted(each.name for each in self._held))
        self._looks = self.peers.gather(Look(host, [each.image for each in self._local.values()]))
        visible = [{(i.key, i.rank): i for i in look.images} for look in self._looks]
        whole: list[tuple[ImageFacts, bool]] = []
        for key in sorted({key for images in visible for key, _ in images}, reverse=True):
            image = next((images[key, 0] for images in visible if (key, 0) in images), None)
            if image is None:
                continue
            parts = [(key, rank) for rank in range(image.world_size)]
            if not all(any(part in images for images in visible) for part in parts):
                continue
            is_spread = not all(part in images for images in visible for part in parts)
            if is_spread and not self._fits(image, topology):
                continue
            whole.append((image, is_spread))
        cards = self._cards_for_coordinator(whole, visible)
        if self.peers.is_coordinator:
            self.complete = [each for each in (self._put_together(*found, cards) for found in whole) if each]

    def fetch(self, key: ImageKey) -> None:
        """Have each rank receive its image of `key` from another host, if its own host lacks it. **Collective**.

        The ranks have one image each. Raises OSError on every rank where one has no memory for it.
        """
        where = [frozenset(i.rank for i in look.images if i.key == key) for look in self._looks]
        here = {rank: local.held for (of, rank), local in self._local.items() if of == key}
        held = fetched(moves(where), here, self.peers)
        is_new = (key, self.peers.rank) not in self._local
        if held is not None and is_new and (local := _read_held(held)) is not None:
            self._fetched.append((key, held))
            self._held.append(held)
            self._local[key, self.peers.rank] = local

    def files(self, key: ImageKey, manifest: Manifest, *, is_spread: bool) -> FilesInMemory:
        """Return the files of `manifest`, which the coordinator put together for the images `key`. Any rank."""
        images = {
            local.card.file: local.held.arena_fd
            for (of, _), local in self._local.items()
            if of == key and local.card.file in manifest.files
        }
        own = self._local.get((key, self.peers.rank))
        return FilesInMemory(manifest, images, (own.card.file if own else "") if is_spread else None)

    def shared_out(self, loaded: ImageKey | None) -> TakenOver:
        """Return the descriptors that this rank is to own, those of the images `loaded` first, and all their names.

        Each arena of a host goes to one of its ranks: to that which wrote it, if there is one, so that none is lost and
        none is shared. Images that the run does not come from are no images any more. Any rank, after a load; the
        caller owns the descriptors, and drops the names at the keeper.
        """
        on_host = [rank for rank, look in enumerate(self._looks) if look.host and look.host == self._own_host]
        local = {each.held.name: (key, each) for (key, _), each in self._local.items()}
        useful: list[tuple[bool, ImageKey, HeldMemory]] = []
        spare: list[HeldMemory] = []
        replica_bytes = 0
        for of, held in self._fetched:
            self._held.remove(held)
            if self._stays(of, loaded):
                useful.append((of == loaded, of, held))
            else:
                held.close()
        # By name, so that all ranks of a host divide them alike without an exchange.
        for number, held in enumerate(sorted(self._held, key=lambda each: each.name)):
            key, found = local.get(held.name, (None, None))
            writer = -1 if found is None else found.image.rank
            stays = key is not None and self._stays(key, loaded)
            is_foreign = 0 <= writer < self.peers.world_size and writer not in on_host
            if is_replica(held.name) and stays and is_foreign:
                # Whoever receives replicas here takes them over.
                replica_bytes += os.fstat(held.arena_fd).st_size
                held.close()
            elif (writer if writer in on_host else on_host[number % len(on_host)]) != self.peers.rank:
                held.close()
            elif key is not None and stays and not is_foreign and _is_usable(held):
                useful.append((key == loaded, key, held))
            else:
                _clear(held)
                spare.append(held)
        # What was loaded comes first, because there may be room for only some of them.
        useful.sort(key=lambda each: each[:2], reverse=True)
        usable = [held for held in spare if _is_usable(held)][:MOST_SPARE]
        self._drop([held for held in spare if held not in usable])
        own = [held for *_, held in useful] + usable
        names = [name for held in own if held.name for name in (held.name, *self._more_names.get(held.name, ()))]
        arenas = [(held.arena_fd, held.mark_fd) for held in own]
        return TakenOver(arenas, names, sum(is_loaded for is_loaded, *_ in useful), replica_bytes)

    def close(self) -> None:
        """Close what was not shared out. Idempotent."""
        for held in self._held:
            held.close()
        self._held, self._local, self._fetched = [], {}, []

    @property
    def are_any(self) -> bool:
        """Return whether a keeper of any host holds something; the same on every rank."""
        return any(look.host for look in self._looks)

    @property
    def _own_host(self) -> tuple[str, ...]:
        return self._looks[self.peers.rank].host if self._looks else ()

    def _stays(self, key: ImageKey, loaded: ImageKey | None) -> bool:
        """Return whether the images `key` are those that were `loaded`, or earlier ones of the same start."""
        if loaded is None or key in self.left_out:
            return False
        return key.start == loaded.start and (key.step, key.copy) <= (loaded.step, loaded.copy)

    def _list(self) -> None:
        """List what it holds, unless a process of another start may still write into it. Raises `UnknownFormat`."""
        keeper = self.keeper
        if keeper is None:
            return
        held: list[HeldMemory] = []
        try:
            held = keeper.held(self.start)
            is_mapped = any(each.is_mapped for each in held)
            if is_mapped and keeper.wait_until_unmapped(END_SECONDS, self.start):
                # Until it ended that process may have kept others, and all ranks must find the same.
                while held:
                    held.pop().close()
                held, is_mapped = keeper.held(self.start), False
            if not is_mapped:
                self._held = self._each_once(held)
            else:
                logger.warning(
                    "In-memory snapshots are not used: a process of another start, or a manager of this one that was "
                    "not closed, can still write into them. End that process, or close that manager, first"
                )
        except KeeperUnavailable as error:
            logger.warning("In-memory snapshots are not used: %s. Loading from disk", error.reason)
        if not self._held:
            for each in held:
                each.close()
        ignored: list[str] = []
        for each in self._held:
            try:
                local = _read_held(each)
            except (UnusableMark, ValueError, RecursionError, OSError) as error:
                ignored.append(f"{each.name}: {error}")
            else:
                if local is not None:
                    self._note(local)
        if ignored:
            logger.warning("Ignored %s, such as %s", counted(len(ignored), "unusable in-memory snapshot"), ignored[0])

    def _note(self, local: _Local) -> None:
        """Note `local`, unless another memory has the same image and is not damaged."""
        place = local.image.key, local.image.rank
        if (other := self._local.get(place)) is None or not _matches_its_digests(other):
            self._local[place] = local

    def _drop(self, unused: Sequence[HeldMemory]) -> None:
        """Close what is of no use, and have the keeper let go of it: it may leave no room for new images."""
        names = [name for held in unused for name in (held.name, *self._more_names.get(held.name, ()))]
        for held in unused:
            held.close()
        if names and self.keeper is not None:
            with suppress(KeeperUnavailable):  # Whoever keeps an image next says so.
                self.keeper.drop(names)

    def _each_once(self, held: Sequence[HeldMemory]) -> list[HeldMemory]:
        """Return one of each memory, and close the others.

        A start that was killed between keeping an arena and dropping its older name leaves both. Two arenas of one
        memory would overwrite each other.
        """
        first: dict[tuple[int, int], HeldMemory] = {}
        for each in sorted(held, key=lambda each: each.name):
            found = os.fstat(each.arena_fd)
            before = first.setdefault((found.st_dev, found.st_ino), each)
            if before is not each:
                self._more_names.setdefault(before.name, []).append(each.name)
                each.close()
        return list(first.values())

    def _fits(self, image: ImageFacts, topology: str) -> bool:
        """Return whether each rank needs its own image alone, as it can be had where they are on several hosts."""
        if image.world_size == self.peers.world_size and image.topology == topology:
            return True
        if self.peers.is_coordinator:
            logger.warning(
                "The in-memory snapshots of step %d are on several hosts, and not of the topology of this run "
                "but of %s: they are not used",
                image.key.step,
                image.topology,
            )
        return False

    def _cards_for_coordinator(
        self,
        whole: Sequence[tuple[ImageFacts, bool]],
        visible: Sequence[dict[tuple[ImageKey, int], ImageFacts]],
    ) -> dict[tuple[ImageKey, int], bytes]:
        """Return the cards that the coordinator lacks, from the first rank that has them. **Collective**."""
        parts = ((image.key, rank) for image, _ in whole for rank in range(image.world_size))
        wanted = [part for part in parts if part not in visible[0]]
        if not wanted:
            return {}
        first = {each: next(rank for rank, images in enumerate(visible) if each in images) for each in wanted}
        mine = {each: self._local[each].card.to_bytes() for each in wanted if first[each] == self.peers.rank}
        return {each: card for sent in self.peers.gather(mine) for each, card in sent.items()}

    def _put_together(
        self, image: ImageFacts, is_spread: bool, cards: dict[tuple[ImageKey, int], bytes]
    ) -> Complete | None:
        key = image.key
        try:
            manifest = assembled_manifest(
                [
                    self._local[key, rank].card if (key, rank) in self._local else Card.parse(cards[key, rank])
                    for rank in range(image.world_size)
                ]
            )
        except Exception as error:
            # A card may hold anything: whatever is wrong with it, the next source is tried.
            logger.warning("The in-memory snapshots of step %d are ignored: %s", key.step, error)
            return None
        return Complete(image, manifest, is_spread)


def _read_held(held: HeldMemory) -> _Local | None:
    """Return the image under `held`; None if it is empty. Raise ValueError, `RecursionError` or OSError if unusable."""
    marked = read_mark(held.mark_fd)
    if marked is None:
        return None
    card, arena_bytes = Card.parse(marked.card), os.fstat(held.arena_fd).st_size
    if card.key.step != marked.step:
        raise ValueError(f"its valid flag is of step {marked.step}, its header of step {card.key.step}")
    if not card.record.size <= marked.num_bytes <= arena_bytes:
        sizes = f"its valid flag says {marked.num_bytes}, its header {card.record.size}"
        raise ValueError(f"it has {arena_bytes} bytes, {sizes}")
    return _Local(held, ImageFacts.of_card(card), card)


def _matches_its_digests(local: _Local) -> bool:
    """Return whether each block of the image has its digest."""
    record, reader = local.card.record, MappedReader({"image": local.held.arena_fd})
    try:
        reader.verify(Path("image"), record, range(num_blocks(record.size)))
    except DamagedRange:
        return False
    finally:
        reader.close()
    return True


def _is_usable(held: HeldMemory) -> bool:
    """Return whether an arena and its mark can be mapped and written."""
    try:
        sizes = [os.fstat(fd).st_size for fd in (held.arena_fd, held.mark_fd)]
        seals = [fcntl.fcntl(fd, _GET_SEALS) & _BAD_SEALS for fd in (held.arena_fd, held.mark_fd)]
    except OSError:
        return False
    return sizes[0] > 0 and sizes[1] >= PAGE_BYTES and not any(seals)


def _clear(held: HeldMemory) -> None:
    """Make the image under `held`, if there is one, invalid."""
    try:
        mark = Mark(os.dup(held.mark_fd))
    except (OSError, ValueError):
        return  # It is too small for a mark.
    mark.clear()
    mark.close()


CHUNK_BYTES = 64 << 20
"""Of one message: what was sent is in the sender's memory until it was received."""


class Move(NamedTuple):
    """Rank `source` sends the image of rank `rank` to it."""

    source: int
    rank: int


def moves(where: Sequence[frozenset[int]]) -> list[Move]:
    """Return who sends what, if `where` has by rank the ranks whose images are on its host. The same on every rank.

    Those that have an image share the work evenly.
    """
    num_sent = [0] * len(where)
    found = []
    for rank, images in enumerate(where):
        having = [source for source, theirs in enumerate(where) if rank in theirs]
        if rank not in images and having:
            source = min(having, key=lambda each: (num_sent[each], each))
            num_sent[source] += 1
            found.append(Move(source, rank))
    return found


def fetched(to_move: Sequence[Move], here: Mapping[int, HeldMemory], peers: Peers) -> HeldMemory | None:
    """Send and receive what `to_move` says; return what this rank received, which the caller owns. **Collective**.

    `here` has the images on this host, by rank. What arrives is not verified: a load does that. Raises OSError on every
    rank where one has no memory.
    """
    if not to_move:
        return None
    began = time.monotonic()
    # Of each image its mark, and the bytes of its arena.
    mine = {move.rank: _announced(here[move.rank]) for move in to_move if move.source == peers.rank}
    announced = {rank: each for of_rank in peers.gather(mine) for rank, each in of_rank.items()}
    own = announced.get(peers.rank)
    # All ranks have theirs before the first byte is sent, or none sends any.
    memory = peers.together(lambda: None if own is None else _staging_memory(own[1]))
    waits: list[Callable[[], object]] = []
    for move in to_move:
        num_bytes = announced[move.rank][0].num_bytes
        if move.source == peers.rank:
            view = map_shared(here[move.rank].arena_fd, num_bytes)
            waits += [peers.relay(part, None, move.rank) for part in _memory_chunks(view)]
        elif move.rank == peers.rank and memory is not None:
            for part in _memory_chunks(map_shared(memory, num_bytes)):
                peers.relay(part, move.source, None)
    for wait in waits:
        wait()
    if peers.is_coordinator:
        logger.info(
            "The in-memory snapshots of %s (%s) came from other hosts in %.1f s",
            counted(len(to_move), "rank"),
            readable_bytes(sum(marked.num_bytes for marked, _ in announced.values())),
            time.monotonic() - began,
        )
    if own is None or memory is None:
        return None
    mark = Mark()
    marked, _ = own
    mark.set(marked.step, marked.num_bytes, marked.card)
    mark_fd = os.dup(mark.fd)
    mark.close()
    return HeldMemory("", memory, mark_fd, is_mapped=False)


def _announced(image: HeldMemory) -> tuple[Marked, int]:
    marked = read_mark(image.mark_fd)
    assert marked is not None, "it was valid when this start looked, and nothing writes into it"
    return marked, os.fstat(image.arena_fd).st_size


def _staging_memory(num_bytes: int) -> int:
    fd = os.memfd_create("torchtitan_lite-staging", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _memory_chunks(view: memoryview) -> list[torch.Tensor]:
    whole = (
        torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return list(torch.split(whole, CHUNK_BYTES))
