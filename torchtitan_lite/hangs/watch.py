"""The rank's end of its watcher process: a few words of shared memory, and a thread that answers it.

A step costs four writes to memory. The thread waits for the watcher, which asks only when a step is overdue.
"""

from __future__ import annotations

import faulthandler
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from torchtitan_lite.disk.helper import Helper
from torchtitan_lite.distributed.environment import master_address
from torchtitan_lite.hangs import watcher
from torchtitan_lite.hangs.own_rank import BOUND_MS, COUNT, IS_PAUSED, STEP, WORDS_BYTES, Bound, dump_signal, map_words
from torchtitan_lite.log import logger

if TYPE_CHECKING:
    from torchtitan_lite.distributed.peers import Peers

_BACKLOG = 4096
STOP_SECONDS = 1.0
"""How long a watcher may take to end by itself before it is killed."""
MOST_DEATHS = 10
"""Of watchers of one start, until none takes the place of the last one."""


class HangWatch(Helper):
    """Watches this rank from `__enter__`, which is **collective**, to `__exit__`. Main thread only.

    `count_collectives` returns how many collectives this rank has begun, by group; any thread calls it. `events` is
    the file for the event that names a rank, None for none; a scheduler sends `ignored_signals` to process groups.
    """

    def __init__(
        self,
        setting: int | Literal["auto"],
        ranks: Peers,
        count_collectives: Callable[[], Mapping[str, int]],
        *,
        events: Path | None,
        ignored_signals: Sequence[str] = (),
        gives_up_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("Watcher", watcher.__name__, ignored_signals)
        self._bound = Bound(setting)
        self._ranks = ranks
        self._events = str(events or "")
        self._count_collectives = count_collectives
        self._gives_up_seconds = gives_up_seconds
        self._clock = clock
        self._began: float | None = None
        self._is_warned = False
        self._words = memoryview(bytearray(WORDS_BYTES)).cast("Q")
        self._fds: list[int] = []
        self._listening: socket.socket | None = None
        """At which the watcher of rank 0 listens: of this process, because another watcher may take its place."""
        self._orders: watcher.Orders | None = None
        self._num_deaths = 0
        self._needs_another = False

    def step(self, step: int) -> None:
        """Note that the step before is over and that `step` begins."""
        if self._needs_another:
            self._start_another()
        now = self._clock()
        if self._began is not None:
            self._bound.step_took(now - self._began)
        self._began = now
        seconds = self._bound.seconds
        words = self._words
        words[STEP], words[BOUND_MS] = step, round(1000 * seconds)
        words[COUNT] += 1
        if seconds >= self._gives_up_seconds and not self._is_warned:
            self._is_warned = True
            text = (
                "A rank that hangs would be reported after %.0f s, but the others give up earlier. Raise "
                "comm.train_timeout_seconds, which is %.0f"
            )
            logger.warning(text, seconds, self._gives_up_seconds)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time of the block, which may take as long as it needs."""
        began, words = self._clock(), self._words
        words[IS_PAUSED] = 1
        try:
            yield
        finally:
            words[IS_PAUSED] = 0
            words[COUNT] += 1
            if self._began is not None:
                self._began += self._clock() - began

    def __enter__(self) -> HangWatch:
        self._listening = self._opened()
        port, secret = self._ranks.on_coordinator(
            lambda: (self._listening.getsockname()[1] if self._listening else 0, secrets.token_hex(32))
        )
        address = master_address() if self._ranks.world_size > 1 else ""
        self._orders = watcher.Orders(self._ranks.rank, os.getpid(), address, port, secret, self._events)
        self._prepare()
        self._start_another()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        faulthandler.unregister(dump_signal())
        self.end(STOP_SECONDS)
        self._close()

    def forget(self) -> None:
        super().forget()
        self._close()

    def _opened(self) -> socket.socket | None:
        """Return the socket at which the watcher of rank 0 listens: open before any other rank knows of it."""
        if self._ranks.world_size == 1 or self._ranks.rank:
            return None
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        return socket.create_server(("", 0), backlog=_BACKLOG)

    def _prepare(self) -> None:
        """Make what this rank and its watcher share, and answer the watcher's signal."""
        words_fd = os.memfd_create("torchtitan_lite-watch", os.MFD_CLOEXEC)
        os.ftruncate(words_fd, WORDS_BYTES)
        self._words = map_words(words_fd)
        stacks_fd = os.memfd_create("torchtitan_lite-stacks", os.MFD_CLOEXEC)
        self._fds = [words_fd, stacks_fd]
        # What `unregister` restores: a signal that comes late must not end the rank.
        signal.signal(dump_signal(), signal.SIG_IGN)
        # Not the stacks of all threads: those that run change their frames meanwhile, and the process would crash.
        faulthandler.register(dump_signal(), file=stacks_fd, all_threads=False, chain=False)

    def _start_another(self) -> None:
        """Start a watcher, in the place of one that has ended; nothing fails where the system has no process left."""
        self._needs_another = False
        self.end()
        listening = [] if self._listening is None else [self._listening.fileno()]
        try:
            self._start(self._orders, [*self._fds, *listening])
            self._listen()
        except OSError:
            self._ended(has_died=True)

    def _heard(self, message: Any) -> None:
        self._send(dict(self._count_collectives()))

    def _ended(self, *, has_died: bool) -> None:
        if has_died:
            self._num_deaths += 1
            self._needs_another = self._num_deaths <= MOST_DEATHS
            until = " before its next step" if self._needs_another else ""
            has_ended = "The process that watches rank %d has ended: a hang of this rank is not reported%s"
            logger.warning(has_ended, self._ranks.rank, until)

    def _close(self) -> None:
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)
        if self._listening is not None:
            self._listening.close()
