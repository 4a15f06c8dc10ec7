"""Memory of this host that a GPU copies from and to by itself: its pages are locked (pinned, registered).

They are locked in pieces of at most `PIECE_BYTES`. One call for all of a large arena fails from 512 GiB on, and a long
one holds up other work of the device (by reports of others). No copy may cross from one piece to the next. What cannot
be locked (a limit, a container, a device without this call) stays as it is, and copies of it are slower.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol

import torch

from torchtitan_lite.disk.shared_memory import address_of
from torchtitan_lite.disk.threads import daemon
from torchtitan_lite.log import logger

PIECE_BYTES = 256 << 20
"""0.02 s to lock, and 0.1 s to unlock: no longer than that an exit waits."""


class PageLock(Protocol):
    """Locks pages. Any thread, once it has called what `for_thread` returned."""

    def for_thread(self) -> Callable[[], object]:
        """Return what a thread calls that is to lock pages for the device of this one."""
        ...

    def lock(self, address: int, num_bytes: int) -> str:
        """Lock the pages of this memory; return why that is not possible, nothing if it was."""
        ...

    def unlock(self, address: int) -> str:
        """Unlock the pages that were locked with this address; return why that is not possible."""
        ...


class CudaPageLock:
    """Registers memory with CUDA or ROCm."""

    def for_thread(self) -> Callable[[], object]:
        device = torch.cuda.current_device()
        return lambda: torch.cuda.set_device(device)  # Each thread starts with device 0.

    def lock(self, address: int, num_bytes: int) -> str:
        portable = 1  # Locked for every device's context.
        return _cuda_error(_cudart().cudaHostRegister(address, num_bytes, portable))

    def unlock(self, address: int) -> str:
        return _cuda_error(_cudart().cudaHostUnregister(address))


class LockedPages:
    """The pages of `memory` that `lock` has locked for the device of the thread that makes this; none without it."""

    def __init__(self, memory: memoryview, lock: PageLock | None) -> None:
        self._memory, self._lock = memory, lock
        self._enter = bool if lock is None else lock.for_thread()
        self._addresses: list[int] = []
        self._refusal = ""

    @property
    def is_empty(self) -> bool:
        return not self._addresses

    def lock(self, begin: int, end: int) -> None:
        """Lock the pages of bytes [begin, end), at most a piece. Warns once if that is not possible."""
        if self._lock is None or self._refusal or _IS_EXITING.is_set():
            return
        address = address_of(self._memory) + begin
        self._refusal = self._lock.lock(address, end - begin)
        if self._refusal:
            logger.warning(
                "Memory for copies could not be page-locked (%s, %d of %d bytes are); copies will be slower",
                self._refusal,
                begin,
                len(self._memory),
            )
        else:
            self._addresses.append(address)

    def unlock(self) -> None:
        """Unlock all: nothing may be copied there any more. Before the memory is unmapped. Idempotent."""
        while self._lock is not None and self._addresses and not _IS_EXITING.is_set():
            refusal = self._lock.unlock(self._addresses.pop())
            if refusal:
                logger.warning("Page-locked memory could not be released (%s)", refusal)
                _KEPT.append(self._memory)

    def unlock_in_background(self, then: Callable[[], None]) -> None:
        """Unlock all and call `then` in a thread: it takes 0.3 s a GB. An exit waits for one piece at most."""

        def work() -> None:
            try:
                self._enter()
                self.unlock()
            finally:
                then()

        try:
            _UNLOCKING.append(daemon("unlocking", work))
        except OSError:  # The system has no more threads.
            work()

    def forget(self) -> None:
        """Leave the pages to the parent of this forked child."""
        self._addresses.clear()


def pieces(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield bytes [begin, end), cut where one piece ends and the next begins."""
    while begin < end:
        border = min(end, (begin // PIECE_BYTES + 1) * PIECE_BYTES)
        yield begin, border
        begin = border


def is_cut(begin: int, end: int) -> bool:
    """Return whether bytes [begin, end) are in several pieces."""
    return begin // PIECE_BYTES < (end - 1) // PIECE_BYTES


def wait_for_unlocking() -> None:
    """Wait until memory is free that was given up before: there may be none for more. Any thread."""
    for thread in [*_UNLOCKING]:
        thread.join()
        with suppress(ValueError):  # Another one waited for it, too.
            _UNLOCKING.remove(thread)


def build_page_lock() -> PageLock | None:
    """Return what locks pages on this machine, None without a GPU that gains from it."""
    return CudaPageLock() if torch.cuda.is_available() else None


@atexit.register
def _end() -> None:
    # A thread that comes back from CUDA while the interpreter ends would abort the process (before Python 3.14).
    _IS_EXITING.set()
    wait_for_unlocking()


_UNLOCKING: list[threading.Thread] = []
_IS_EXITING = threading.Event()
_KEPT: list[memoryview] = []
"""Memory that is still locked must not be unmapped."""


def _cuda_error(result: Any) -> str:
    return f"CUDA error {int(result)}" if int(result) else ""


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped
