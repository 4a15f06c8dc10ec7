"""Bytes that ranks of one host pass to each other, in the memory of the host.

Ranks that read the same number their requests alike, and each is made by one of them, which offers what came to the
others. It is an offer only: a rank that does not get it in time, or gets something else, makes the request itself. So
none needs another one, and what is taken must be checked as if it came from the store. Each rank has a ring of slots;
a slot is filled again once every other rank has released it. That is for speed alone: a taker copies what it takes,
and looks afterwards whether the slot still had it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Protocol

import xxhash

from torchtitan_lite.disk.read_requests import ReadsBlocks

SLOT_BYTES = 8 << 20
SLOTS = 4
PATIENCE_SECONDS = 15.0
"""How long the threads of a rank wait for another one: after that they make the requests of that one themselves."""
_POLL_SECONDS = 0.0005
_NAME = "torchtitan_lite-exchange"
_HEADER_BYTES = mmap.PAGESIZE
_CLOSED, _FIRST_SLOT = 1, 2
"""Words of the header: whether the ring has ended, and the first of the slots' words, which are `_WORDS` each."""
_NUMBER, _KEY, _LENGTH, _WORDS = 0, 1, 2, 3
_ALL = (1 << 64) - 1
_FD_BITS, _MAGIC_BITS = 20, 20
MOST_RANKS = (_HEADER_BYTES // 8 - _FIRST_SLOT - SLOTS * _WORDS) // SLOTS
"""Of one exchange: the header has a word for each of them and each slot."""


class Exchanges:
    """What passes bytes between ranks; this one knows no other rank, and passes nothing."""

    def reserve(self, count: int) -> int:
        """Return the number of the first of `count` requests, which are made in the same order on all ranks."""
        return 0

    def take(self, number: int, key: str) -> memoryview | None:
        """Return a copy of the bytes of request `number`; None if this rank is to make it. Any thread.

        `key` names the request: nothing else is returned for it.
        """
        return None

    def offer(self, number: int, key: str, data: memoryview) -> None:
        """Offer the bytes of request `number`, if it is this rank's. Any thread; may wait for the others."""

    def release(self, number: int) -> None:
        """Say that this rank needs nothing of request `number` any more. Any thread."""

    def leave(self) -> None:
        """Say that this rank needs nothing, and offers nothing, from now on: others wait for it no more."""


class ReadsAlike(Protocol):
    """What the ranks of a job are about to read, and which of them read the same. All methods are **collective**."""

    def is_shared(self) -> bool:
        """Return whether another rank of this host reads exactly what this one does, and it is much."""
        ...

    def over_hosts(self, own: ReadsBlocks, alone: ReadsBlocks) -> ReadsBlocks:
        """Return what reads with `own`, and with ranks of other hosts that read the same: `alone`, if there are none.

        What these ranks do not pass on it reads with `alone`.
        """
        ...

    def exchange(self) -> AbstractContextManager[Exchanges]:
        """Return the exchange of this rank with those ranks, for the time of the block."""
        ...


class Ring:
    """The memory of one rank, in the descriptor `fd`, which this object owns. Raises OSError and ValueError."""

    def __init__(self, fd: int, *, is_new: bool = False) -> None:
        self.fd = fd
        num_bytes = _HEADER_BYTES + SLOTS * SLOT_BYTES
        try:
            if is_new:
                os.ftruncate(fd, num_bytes)
            self._map = mmap.mmap(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise
        self._bytes = memoryview(self._map)
        self.words = self._bytes[:_HEADER_BYTES].cast("Q")

    @classmethod
    def make(cls) -> Ring:
        ring = cls(os.memfd_create(_NAME, os.MFD_CLOEXEC), is_new=True)
        ring.words[0] = secrets.randbits(_MAGIC_BITS)
        return ring

    @property
    def number(self) -> int:
        """What another process of this host finds it by."""
        return ((os.getpid() << _FD_BITS | self.fd) << _MAGIC_BITS) | self.words[0]

    @classmethod
    def of(cls, number: int) -> Ring:
        """Return the ring of another process that has the number `number`. Raises OSError and ValueError."""
        place, magic = divmod(number, 1 << _MAGIC_BITS)
        pid, fd = divmod(place, 1 << _FD_BITS)
        path = f"/proc/{pid}/fd/{fd}"
        # Where processes are numbered otherwise there, this is a file of another one, which is not even opened.
        if _NAME not in os.readlink(path):  # noqa: PTH115  # a name, not a path
            raise ValueError("the shared memory is not the one that this rank announced")
        ring = cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        if ring.words[0] != magic:
            ring.close()
            raise ValueError("the shared memory is not the one that this rank announced")
        return ring

    def word(self, slot: int, which: int) -> int:
        """Return the place of a word of `slot`."""
        return _FIRST_SLOT + slot * _WORDS + which

    def released(self, slot: int, position: int) -> int:
        """Return the place of the word with the number up to which the rank at `position` has released `slot`."""
        return _FIRST_SLOT + SLOTS * _WORDS + position * SLOTS + slot

    def contents(self, slot: int) -> memoryview:
        begin = _HEADER_BYTES + slot * SLOT_BYTES
        return self._bytes[begin : begin + SLOT_BYTES]

    def close(self) -> None:
        self.words.release()
        self._bytes.release()
        # The traceback of an error may still refer to what was taken.
        with suppress(BufferError):
            self._map.close()
        os.close(self.fd)


class HostExchange(Exchanges):
    """The exchange between `rings`, one for each rank by position; this rank's is at `position`."""

    def __init__(self, rings: Sequence[Ring], position: int, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._rings = rings
        self._position = position
        self._patience_seconds = patience_seconds
        self._reserved = 0
        self._given_up: set[int] = set()
        """The positions of ranks that nothing is waited for any more."""
        self._filling = [threading.Lock() for _ in range(SLOTS)]
        self._releasing = threading.Lock()

    def reserve(self, count: int) -> int:
        first = self._reserved
        self._reserved += count
        return first

    def take(self, number: int, key: str) -> memoryview | None:
        owner, slot = self._place(number)
        if owner == self._position or owner in self._given_up:
            return None
        ring, own = self._rings[owner], self._rings[self._position]
        at = ring.word(slot, _NUMBER)
        # What is offered is numbered from 1: an empty slot has 0.
        if not self._wait(lambda: ring.words[at] > number or bool(ring.words[_CLOSED] or own.words[_CLOSED])):
            self._given_up.add(owner)
        if not self._has(ring, slot, number, key):
            return None
        length = ring.words[ring.word(slot, _LENGTH)]
        if not 0 < length <= SLOT_BYTES:
            return None
        data = memoryview(bytes(ring.contents(slot)[:length]))
        # Else it was filled again meanwhile.
        return data if self._has(ring, slot, number, key) else None

    def offer(self, number: int, key: str, data: memoryview) -> None:
        owner, slot = self._place(number)
        ring = self._rings[self._position]
        if owner != self._position:
            return
        # A request that takes long may come when a later one is in its slot, or about to be.
        with self._filling[slot]:
            before = ring.words[ring.word(slot, _NUMBER)]
            others = [ring.released(slot, other) for other in range(len(self._rings)) if other != owner]
            if before > number:
                return
            is_free = self._wait(lambda: bool(ring.words[_CLOSED]) or all(ring.words[at] >= before for at in others))
            if not is_free:
                ring.words[_CLOSED] = 1
            if ring.words[_CLOSED]:
                return
            # No rank takes it while it is filled.
            ring.words[ring.word(slot, _NUMBER)] = 0
            fits = len(data) <= SLOT_BYTES
            if fits:
                ring.contents(slot)[: len(data)] = data
            ring.words[ring.word(slot, _LENGTH)] = len(data) if fits else 0
            ring.words[ring.word(slot, _KEY)] = _hashed(key)
            # The number last: it says that the others are there.
            ring.words[ring.word(slot, _NUMBER)] = number + 1

    def release(self, number: int) -> None:
        owner, slot = self._place(number)
        if owner != self._position:
            ring = self._rings[owner]
            at = ring.released(slot, self._position)
            with self._releasing:
                # After `leave`, and after a later request, it is more already.
                ring.words[at] = max(ring.words[at], number + 1)

    def leave(self) -> None:
        self._rings[self._position].words[_CLOSED] = 1
        with self._releasing:
            for ring in self._rings:
                for slot in range(SLOTS):
                    ring.words[ring.released(slot, self._position)] = _ALL

    def close(self) -> None:
        """Leave; others may still take what this rank has offered. No thread is in another method."""
        self.leave()
        for ring in self._rings:
            ring.close()

    def _has(self, ring: Ring, slot: int, number: int, key: str) -> bool:
        words = ring.words
        return words[ring.word(slot, _NUMBER)] == number + 1 and words[ring.word(slot, _KEY)] == _hashed(key)

    def _place(self, number: int) -> tuple[int, int]:
        """Return the position of the rank that makes request `number`, and the slot of its ring."""
        return number % len(self._rings), number // len(self._rings) % SLOTS

    def _wait(self, is_over: Callable[[], bool]) -> bool:
        """Wait until `is_over`; return whether it was in time."""
        end = time.monotonic() + self._patience_seconds
        while not is_over():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_SECONDS)
        return True


def made() -> Ring | None:
    """Return a new ring; None where the system has no such memory."""
    try:
        return Ring.make()
    except (OSError, AttributeError):  # AttributeError: of a system without memfd_create.
        return None


def opened_rings(mine: Ring, numbers: Sequence[int], position: int) -> list[Ring] | None:
    """Return the rings that have `numbers`, of which `mine` is at `position`; None, and close them, if one is missing.

    Ranks of a host may be in containers of their own, where no rank gets at the memory of another one.
    """
    rings: list[Ring] = []
    try:
        for other, number in enumerate(numbers):
            rings.append(mine if other == position else Ring.of(number))
        return rings
    except (OSError, ValueError):
        for ring in {id(ring): ring for ring in (mine, *rings)}.values():
            ring.close()
        return None


def _hashed(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode())
