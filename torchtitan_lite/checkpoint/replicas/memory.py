"""The memory of the images of other hosts here: for each of their ranks one that is valid, and one that arrives."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from torchtitan_lite.checkpoint.images.belonging import ImageFacts, is_replica, replica_name
from torchtitan_lite.checkpoint.images.card import Card, ImageKey
from torchtitan_lite.checkpoint.staging.mark import Mark, read_mark
from torchtitan_lite.disk.digest import digest_blocks
from torchtitan_lite.disk.shared_memory import map_shared
from torchtitan_lite.errors import KeeperUnavailable, UnknownFormat
from torchtitan_lite.keeper.client import HeldMemory, Keeper


@dataclass(eq=False)
class ReplicaPlace:
    """Memory for one replica."""

    name: str
    arena_fd: int
    mark: Mark
    size: int
    key: ImageKey | None = None
    """Of the valid image in it; None for none."""
    card: Card | None = None
    """Of the image that arrives; None for none."""
    num_bytes: int = 0

    @property
    def view(self) -> memoryview:
        """The memory of the image that arrives."""
        return map_shared(self.arena_fd, self.num_bytes)


class ReplicaMemory:
    """The replicas of the ranks `senders` at `keeper`, also those of the start before. Any thread."""

    def __init__(self, keeper: Keeper, start: str, senders: Sequence[int], most_bytes: int) -> None:
        self._keeper, self._start, self._most_bytes = keeper, start, most_bytes
        self._lock = threading.Lock()
        self._places: dict[int, list[ReplicaPlace]] = {rank: [] for rank in senders}
        self._has_adopted = False

    def place(self, card: Card, num_bytes: int, keeps: ImageKey | None) -> ReplicaPlace | None:
        """Return the memory for the image of `card`, which is empty now; None if that very image is here.

        The caller releases it. All but the image `keeps` may be overwritten. Raises ValueError for one that is not
        expected here, `KeeperUnavailable`, and OSError.
        """
        key = ImageFacts.of_card(card).key
        if card.rank not in self._places:
            raise ValueError(f"rank {card.rank} has its replicas elsewhere")
        if not card.record.size <= num_bytes <= self._most_bytes:
            raise ValueError(f"{num_bytes} bytes, expected {card.record.size} to {self._most_bytes}")
        with self._lock:
            self._join()
            places = self._places[card.rank]
            if any(place.key == key for place in places):
                return None
            # Not what arrives: a connection that broke may still write into it.
            spare = [place for place in places if place.card is None and (place.key is None or place.key != keeps)]
            fitting = next((place for place in spare if place.size >= num_bytes), None)
            for place in spare:
                place.mark.clear()
                place.key = None
                if place is not fitting:
                    self._free(card.rank, place)
            if fitting is None:
                fitting = self._made(card.rank, num_bytes)
            fitting.card, fitting.num_bytes = card, num_bytes
            return fitting

    def finding_after(self, place: ReplicaPlace, card: bytes) -> str:
        """Make the replica in `place` valid, which has arrived, if the keeper holds it; return what is wrong."""
        assert place.card is not None, "an image was to arrive"
        record = place.card.record
        if digest_blocks(place.view[: record.size]) != record.blocks:
            return "its bytes do not have their digests"
        place.mark.set(place.card.key.step, place.num_bytes, card)
        try:
            self._keeper.keep(place.name, (place.arena_fd, place.mark.fd))
        except KeeperUnavailable as error:
            place.mark.clear()
            return str(error)
        place.key = place.card.key
        return ""

    def release(self, place: ReplicaPlace) -> None:
        """Note that nothing is written into `place` any more."""
        with self._lock:
            place.card = None

    def _join(self) -> None:
        """Join the keeper, which the trainer may have started again."""
        if self._has_adopted and not self._keeper.has_ended():
            return
        self._keeper.join(self._start)
        if not self._has_adopted:
            for held in self._keeper.held():
                self._adopt(held)
            self._has_adopted = True
            return
        for place in [place for places in self._places.values() for place in places if place.key]:
            self._keeper.keep(place.name, (place.arena_fd, place.mark.fd))

    def _adopt(self, held: HeldMemory) -> None:
        """Take over what the start before kept of the same ranks; it has the only replicas until new ones are here."""
        try:
            marked = read_mark(held.mark_fd) if is_replica(held.name) else None
            card = None if marked is None else Card.parse(marked.card)
            if card is not None and card.rank in self._places:
                size, key = os.fstat(held.arena_fd).st_size, ImageFacts.of_card(card).key
                place = ReplicaPlace(held.name, held.arena_fd, Mark(held.mark_fd), size, key)
                self._places[card.rank].append(place)
                return
        except (UnknownFormat, ValueError, OSError):
            pass  # What cannot be read is none, and its memory is freed with the keeper.
        held.close()

    def _made(self, rank: int, num_bytes: int) -> ReplicaPlace:
        arena_fd = os.memfd_create("torchtitan_lite-replica", os.MFD_CLOEXEC)
        os.ftruncate(arena_fd, max(num_bytes, 1))
        place = ReplicaPlace(replica_name(self._start, rank), arena_fd, Mark(), num_bytes)
        self._places[rank].append(place)
        return place

    def _free(self, rank: int, place: ReplicaPlace) -> None:
        self._places[rank].remove(place)
        with suppress(KeeperUnavailable):
            self._keeper.drop([place.name])
        os.close(place.arena_fd)
        place.mark.close()
