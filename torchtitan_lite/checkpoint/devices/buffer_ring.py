"""Bytes on their way to and from the tensors of a GPU: through a ring of page-locked memory.

To a device they are verified before, and copied behind: threads that read take a slot, put bytes into it and begin its
copy; meanwhile others read on. A slot is used again once its copy has ended. From a device a thread has the next slot
filled while it empties one. So disk, digests and link work at the same time, in `NUM_SLOTS` x `SLOT_BYTES` of memory.
Bytes of neighbouring memory travel in one copy. What does the copies is a `Link`.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchtitan_lite.checkpoint.devices.link import Link, Wait
from torchtitan_lite.disk.read_requests import request_memory

SLOT_BYTES = 1 << 20
"""About what a copy needs to be as fast as the link: 20 us of 50 GB/s."""
NUM_SLOTS = 16
"""A thread that reads fills one, and there are at most eight; more than a disk gives until a copy has ended."""
_LARGE_COPY = 32 << 10
"""Bytes from which a copy releases the GIL."""
_FETCHED_AT_A_TIME = 2
"""Slots of one thread: one is filled, one is emptied."""


@dataclass(frozen=True)
class DevicePlace:
    """Bytes [begin, end) of the memory of a tensor on a device: `memory` is all of it."""

    ring: DeviceRing
    memory: torch.Tensor
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    def __getitem__(self, part: slice) -> DevicePlace:
        begin, end, _ = part.indices(len(self))
        return replace(self, begin=self.begin + begin, end=self.begin + end)


Part = tuple[DevicePlace, memoryview]
"""Bytes on a device, and as many of this host."""


class DeviceRing:
    """A ring for one load, or one save, over `link`.

    A context: at its end no copy is under way, and the caller's work follows them. The memory is made with the first
    copy.
    """

    def __init__(self, link: Link, num_slots: int = NUM_SLOTS) -> None:
        self._link = link
        self._num_slots = num_slots
        self._free: list[_Slot] = []
        self._under_way: deque[tuple[_Slot, Wait]] = deque()
        self._changed = threading.Condition()
        self._devices: set[torch.device] = set()
        self._unlock: Callable[[], None] | None = None

    def __enter__(self) -> DeviceRing:
        return self

    def __exit__(self, *error: Any) -> None:
        with ExitStack() as stack:
            if self._unlock is not None:
                stack.callback(self._unlock)
            # Also after an error: the memory must stay until no copy reads or writes it.
            stack.callback(self._link.end, [*self._devices])
            self.precede()

    def reaches(self, tensor: torch.Tensor) -> bool:
        """Return whether the ring leads to the memory of `tensor`."""
        return self._link.reaches(tensor)

    def place(self, tensor: torch.Tensor) -> DevicePlace:
        """Return the memory of `tensor`, which is contiguous."""
        self._devices.add(tensor.device)
        return DevicePlace(self, tensor.detach().reshape(-1).view(torch.uint8), 0, tensor.nbytes)

    def follow(self, devices: Iterable[torch.device] = ()) -> None:
        """Let copies that are begun from now on come after what the caller has launched. The caller's thread.

        On the devices of the places, and on `devices`.
        """
        self._devices.update(devices)
        self._link.follow([*self._devices])

    def precede(self) -> None:
        """Let what the caller launches from now on come after the copies that were begun. The caller's thread."""
        self._link.precede(self._devices)

    def copy(self, parts: Iterable[Part]) -> None:
        """Begin to copy to each place its bytes, which may change once this returns. Any thread."""
        for filling in _fillings(parts):
            slot = self._take()
            with self._giving_back_after_an_error(slot):
                slot.fill(filling)
                wait = self._link.begin([*slot.spans(filling)])
            self._leave([(slot, wait)])

    def fetch(self, parts: Iterable[Part]) -> None:
        """Copy from each place its bytes; return once they are there. Any thread, several at a time."""
        begun: deque[tuple[_Slot, Wait, Sequence[Part]]] = deque()
        try:
            for filling in _fillings(parts):
                # Only a thread without a slot waits for one: the others will give theirs back.
                slot = self._take_now()
                while slot is None and begun:
                    self._finish(begun)
                    slot = self._take_now()
                slot = slot or self._take()
                with self._giving_back_after_an_error(slot):
                    wait = self._link.begin([(room, place) for place, room in slot.spans(filling)])
                begun.append((slot, wait, filling))
                if len(begun) == _FETCHED_AT_A_TIME:
                    self._finish(begun)
            while begun:
                self._finish(begun)
        finally:
            self._leave([(slot, wait) for slot, wait, _ in begun])

    def _finish(self, begun: deque[tuple[_Slot, Wait, Sequence[Part]]]) -> None:
        slot, wait, filling = begun[0]
        wait()
        slot.empty(filling)
        begun.popleft()
        self._give_back(slot)

    @contextmanager
    def _giving_back_after_an_error(self, slot: _Slot) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._give_back(slot)
            raise

    def _leave(self, copies: Iterable[tuple[_Slot, Wait]]) -> None:
        """Leave it to who takes a slot next, or to the end, to wait for `copies`."""
        with self._changed:
            self._under_way.extend(copies)
            self._changed.notify_all()

    def _take(self) -> _Slot:
        while (slot := self._take_now()) is None:
            with self._changed:
                self._changed.wait_for(lambda: self._free or self._under_way)
        return slot

    def _take_now(self) -> _Slot | None:
        """Return a slot, once the copy that was left in it has ended; None while threads have all of them."""
        with self._changed:
            if self._unlock is None:
                memory = request_memory(self._num_slots * SLOT_BYTES)
                slots = [_Slot(memory[at : at + SLOT_BYTES]) for at in range(0, len(memory), SLOT_BYTES)]
                self._unlock = self._link.lock(memory)
                self._free = slots
            if self._free:
                return self._free.pop()
            if not self._under_way:
                return None
            slot, wait = self._under_way.popleft()
        try:
            wait()
        except BaseException:
            with self._changed:
                self._under_way.appendleft((slot, wait))  # It may still be read or written.
                self._changed.notify()
            raise
        return slot

    def _give_back(self, slot: _Slot) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify()


class _Slot:
    """Memory of one slot."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._tensor = torch.frombuffer(memory, dtype=torch.uint8)

    def spans(self, parts: Sequence[Part]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the bytes on the device and those of the slot that belong to `parts`, one pair for neighbours."""
        first, begin, at = parts[0][0], 0, 0
        last = first
        for place, data in parts:
            if at and (place.memory is not last.memory or place.begin != last.end):
                yield first.memory[first.begin : last.end], self._tensor[begin:at]
                first, begin = place, at
            last, at = place, at + len(data)
        yield first.memory[first.begin : last.end], self._tensor[begin:at]

    def fill(self, parts: Sequence[Part]) -> None:
        """Put the bytes of `parts` into it."""
        at = 0
        for _, data in parts:
            if data.readonly or len(data) < _LARGE_COPY:
                self._memory[at : at + len(data)] = data
            else:
                ctypes.memmove(self._address + at, _memory_address(data), len(data))
            at += len(data)

    def empty(self, parts: Sequence[Part]) -> None:
        """Take the bytes of `parts` out of it."""
        at = 0
        for _, data in parts:
            if len(data) < _LARGE_COPY:
                data[:] = self._memory[at : at + len(data)]
            else:
                ctypes.memmove(_memory_address(data), self._address + at, len(data))
            at += len(data)


def _memory_address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def _fillings(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Yield `parts`, in order, cut into lists that fill at most a slot."""
    filling: list[Part] = []
    room = SLOT_BYTES
    for place, data in parts:
        while len(data) > room:
            if room:
                filling.append((place[:room], data[:room]))
            yield filling
            place, data, filling, room = place[room:], data[room:], [], SLOT_BYTES
        if len(data):
            filling.append((place, data))
            room -= len(data)
    if filling:
        yield filling
