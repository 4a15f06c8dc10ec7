"""Copies between the memory of this host and that of GPUs, which run behind the caller's back.

What begins them and waits for them is a `Link`: that of CUDA, of nothing, or one of the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Protocol

import torch

from torchtitan_lite.checkpoint.devices.page_lock import CudaPageLock, LockedPages

Wait = Callable[[], None]
"""Returns once copies have ended: the bytes are there, and the memory on both sides may change."""


class Link(Protocol):
    """Copies to and from devices, in the order in which those of each were begun."""

    def reaches(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is on a device that this link leads to."""
        ...

    def lock(self, memory: memoryview) -> Callable[[], None]:
        """Lock the pages of `memory` if that is possible; return what unlocks them."""
        ...

    def begin(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Wait:
        """Begin to copy to each tensor of bytes those of the other; one of the two is on a device. Any thread."""
        ...

    def follow(self, devices: Iterable[torch.device]) -> None:
        """Let copies that are begun from now on come after what the caller has launched."""
        ...

    def precede(self, devices: Iterable[torch.device]) -> None:
        """Let what the caller launches from now on come after the copies that were begun."""
        ...

    def end(self, devices: Iterable[torch.device]) -> None:
        """Return once all copies that were begun have ended, also those of which no `Wait` came back."""
        ...


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

        # CUDA stores its last error per thread: the next kernel that the caller launches would raise a refusal.
        with ThreadPoolExecutor(1) as thread:
            try:
                locking = thread.submit(work)
            except RuntimeError:  # The system has no more threads.
                return lambda: None
            return locking.result().unlock

    def begin(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Wait:
        ends = [target.device if target.is_cuda else source.device for target, source in copies]
        streams = {device: self._streams[device] for device in ends}
        try:
            # A model that was made in inference mode changes only there, and the threads that read are in none.
            with torch.inference_mode():
                for device, (target, source) in zip(ends, copies, strict=True):
                    # The device, too: a thread's own is device 0, which would get a context of this process.
                    with torch.cuda.device(device), torch.cuda.stream(streams[device]):
                        target.copy_(source, non_blocking=True)
            return partial(_wait_for, [_recorded(stream) for stream in streams.values()])
        except BaseException:
            self.end(streams)
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

    def end(self, devices: Iterable[torch.device]) -> None:
        with ExitStack() as stack:
            for device in devices:
                if device in self._streams:
                    stack.callback(self._streams[device].synchronize)


def _wait_for(events: Sequence[torch.cuda.Event]) -> None:
    for event in events:
        with torch.cuda.device(event.device):
            event.synchronize()


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    with torch.cuda.device(stream.device):
        # With blocking=True a thread that waits sleeps instead of using a core.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record(stream)
    return event
