"""Bytes on their way to the tensors of a GPU: through a ring of page-locked memory, verified before, copied behind.

Threads that read take a slot, put bytes into it that were verified, and begin its copy; meanwhile others read on. A
slot is used again once its copy has ended. So disk, digests and link work at the same time, in `NUM_SLOTS` x
`SLOT_BYTES` of memory. Bytes for neighbouring memory travel in one copy. What does the copies is a `Link`.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from torchtitan_lite.checkpoint.staging.page_lock import CudaPageLock, LockedPages
from torchtitan_lite.disk.request_memory import request_memory

SLOT_BYTES = 1 << 20
"""About what a copy needs to be as fast as the link: 20 us of 50 GB/s."""
NUM_SLOTS = 16
"""A thread that reads fills one, and there are at most eight; more than a disk gives until a copy has ended."""
_LARGE_COPY = 32 << 10
"""Bytes from which a copy releases the GIL."""


class Copy(Protocol):
    """Copies that were begun."""

    def wait(self) -> None:
        """Return once their memory may change."""


class Link(Protocol):
    """Copies to devices, in the order in which the copies to each were begun."""

    def reaches(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is on a device that this link leads to."""
        ...

    def lock(self, memory: memoryview) -> Callable[[], None]:
        """Lock the pages of `memory` if that is possible; return what unlocks them."""
        ...

    def begin(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copy:
        """Begin to copy to each tensor of bytes on a device its bytes on this host. Any thread."""
        ...

    def follow(self, devices: Iterable[torch.device]) -> None:
        """Let copies that are begun from now on come after what the caller has launched."""
        ...

    def precede(self, devices: Iterable[torch.device]) -> None:
        """Let what the caller launches from now on come after the copies that were begun."""
        ...


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


class DeviceRing:
    """A ring for one load over `link`. A context: at its end no copy is under way, and the caller's work follows them.

    The memory is made with the first copy.
    """

    def __init__(self, link: Link, num_slots: int = NUM_SLOTS) -> None:
        self._link = link
        self._num_slots = num_slots
        self._free: list[_Slot] = []
        self._under_way: deque[tuple[_Slot, Copy]] = deque()
        self._changed = threading.Condition()
        self._devices: set[torch.device] = set()
        self._unlock: Callable[[], None] | None = None

    def __enter__(self) -> DeviceRing:
        return self

    def __exit__(self, *error: Any) -> None:
        with ExitStack() as stack:
            if self._unlock is not None:
                stack.callback(self._unlock)
            # Also after an error: the memory must stay until no copy reads it.
            for _, copy in self._under_way:
                stack.callback(copy.wait)
            self.precede()

    def reaches(self, tensor: torch.Tensor) -> bool:
        """Return whether the ring leads to the memory of `tensor`."""
        return self._link.reaches(tensor)

    def place(self, tensor: torch.Tensor) -> DevicePlace:
        """Return the memory of `tensor`, which is contiguous."""
        self._devices.add(tensor.device)
        return DevicePlace(self, tensor.detach().reshape(-1).view(torch.uint8), 0, tensor.nbytes)

    def follow(self) -> None:
        """Let copies that are begun from now on come after what the caller has launched. The caller's thread."""
        self._link.follow(self._devices)

    def precede(self) -> None:
        """Let what the caller launches from now on come after the copies that were begun. The caller's thread."""
        self._link.precede(self._devices)

    def copy(self, parts: Sequence[tuple[DevicePlace, memoryview]]) -> None:
        """Begin to copy to each place its bytes, which may change once this returns. Any thread."""
        for filling in _fillings(parts):
            slot = self._take()
            try:
                copy = self._link.begin([*slot.filled(filling)])
            except BaseException:
                self._give_back(slot)
                raise
            with self._changed:
                self._under_way.append((slot, copy))
                self._changed.notify()

    def _take(self) -> _Slot:
        with self._changed:
            if self._unlock is None:
                memory = request_memory(self._num_slots * SLOT_BYTES)
                slots = [_Slot(memory[at : at + SLOT_BYTES]) for at in range(0, len(memory), SLOT_BYTES)]
                self._unlock = self._link.lock(memory)
                self._free = slots
            while not self._free and not self._under_way:
                self._changed.wait()
            if self._free:
                return self._free.pop()
            slot, copy = self._under_way.popleft()
        try:
            copy.wait()
        except BaseException:
            with self._changed:
                self._under_way.appendleft((slot, copy))  # It may still be read.
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

    def filled(self, parts: Sequence[tuple[DevicePlace, memoryview]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Fill it with the bytes of `parts`; yield the copies to make, one for neighbours."""
        first, begin, at = parts[0][0], 0, 0
        last = first
        for place, data in parts:
            if at and (place.memory is not last.memory or place.begin != last.end):
                yield first.memory[first.begin : last.end], self._tensor[begin:at]
                first, begin = place, at
            self._put(data, at)
            last, at = place, at + len(data)
        yield first.memory[first.begin : last.end], self._tensor[begin:at]

    def _put(self, data: memoryview, at: int) -> None:
        if data.readonly or len(data) < _LARGE_COPY:
            self._memory[at : at + len(data)] = data
        else:
            ctypes.memmove(self._address + at, ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data))


def _fillings(parts: Iterable[tuple[DevicePlace, memoryview]]) -> Iterator[list[tuple[DevicePlace, memoryview]]]:
    """Yield `parts`, in order, cut into lists that fill at most a slot."""
    filling: list[tuple[DevicePlace, memoryview]] = []
    room = SLOT_BYTES
    for place, data in parts:
        while len(data) > room:
            filling.append((place[:room], data[:room]))
            yield filling
            place, data, filling, room = place[room:], data[room:], [], SLOT_BYTES
        if len(data):
            filling.append((place, data))
            room -= len(data)
    if filling:
        yield filling


class CudaLink:
    """The copy engine of each CUDA or ROCm device, on a stream of its own. Loads to the host's memory touch none."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._enter: Callable[[], object] = bool
        """What a thread calls that locks pages."""

    def reaches(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def lock(self, memory: memoryview) -> Callable[[], None]:
        def work() -> LockedPages:
            self._enter()
            pages = LockedPages(memory, CudaPageLock())
            pages.lock(0, len(memory))
            return pages

        try:
            # CUDA stores its last error per thread: the next kernel that the caller launches would raise a refusal.
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(work).result().unlock
        except RuntimeError:  # The system has no more threads.
            return _nothing

    def begin(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copy:
        streams = {target.device: self._streams[target.device] for target, _ in copies}
        try:
            # A model that was made in inference mode changes only there, and the threads that read are in none.
            with torch.inference_mode():
                for target, source in copies:
                    # The device, too: a thread's own is device 0, which would get a context of this process.
                    with torch.cuda.device(target.device), torch.cuda.stream(streams[target.device]):
                        target.copy_(source, non_blocking=True)
            return _CudaCopy([_recorded(stream) for stream in streams.values()])
        except BaseException:
            for stream in streams.values():
                stream.synchronize()
            raise

    def follow(self, devices: Iterable[torch.device]) -> None:
        for device in devices:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it so
                self._enter = partial(torch.cuda.set_device, device)
            self._streams[device].wait_stream(torch.cuda.current_stream(device))

    def precede(self, devices: Iterable[torch.device]) -> None:
        for device in devices:
            if device in self._streams:
                torch.cuda.current_stream(device).wait_stream(self._streams[device])


class _CudaCopy:
    def __init__(self, events: Sequence[torch.cuda.Event]) -> None:
        self._events = events

    def wait(self) -> None:
        for event in self._events:
            with torch.cuda.device(event.device):
                event.synchronize()


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    with torch.cuda.device(stream.device):
        # With blocking=True a thread that waits sleeps instead of using a core.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record(stream)
    return event


def _nothing() -> None:
    """Unlock nothing."""


class NoLink:
    """Leads nowhere."""

    def reaches(self, tensor: torch.Tensor) -> bool:
        return False

    def lock(self, memory: memoryview) -> Callable[[], None]:
        return _nothing

    def begin(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copy:
        raise AssertionError("there is nowhere to copy to")

    def follow(self, devices: Iterable[torch.device]) -> None:
        """Do nothing."""

    def precede(self, devices: Iterable[torch.device]) -> None:
        """Do nothing."""


NO_RING = DeviceRing(NoLink())
"""For tensors in the memory of this host."""


def build_link() -> Link:
    """Return the link to the GPUs of this machine, of which it asks only for tensors that are there."""
    return CudaLink()
