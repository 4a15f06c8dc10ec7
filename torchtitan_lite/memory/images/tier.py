"""What the trainer of one rank holds of the memory tier: its keeper, the ids that cards carry, the latest commits.

It decides nothing about steps. Trouble with the keeper is one warning and the end of the tier in this process: training
and saves continue. The keeper starts in a thread, because no step needs to wait for it; the first image does. If it was
killed, the next image starts another one, a few times.
"""

from __future__ import annotations

import atexit
import os
import shlex
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from torchtitan_lite.disk.threads import daemon
from torchtitan_lite.errors import KeeperUnavailable
from torchtitan_lite.log import logger
from torchtitan_lite.memory.images.card import MOST_COMMITS, Commit, commit_of
from torchtitan_lite.memory.keeper.client import Keeper
from torchtitan_lite.store.manifest import CheckpointInfo

if TYPE_CHECKING:
    from torchtitan_lite.checkpoint.staging.arena import (
        StagingArena,  # It loads torch, which a look at images needs not.
    )

MOST_KEEPERS = 4
"""Of one start of a job. More would hardly live longer than these did."""


class TakenOver(NamedTuple):
    """What one rank takes over from the start before. The descriptors are its own."""

    arenas: Sequence[tuple[int, int]]
    """Memory and mark of each; those of the image that was loaded first."""
    names: Sequence[str]
    """Under which the keeper holds them."""
    num_loaded: int = 0
    """How many of the arenas have what was loaded: the parts of several ranks of the earlier start."""
    replica_bytes: int = 0
    """Of the replicas that stay as they are at the keeper of this host."""


class Tier:
    """The images of this process, at `keeper`."""

    def __init__(self, keeper: Keeper, rank: int) -> None:
        self.keeper = keeper
        self.start = ""
        """The id of this start of the job; the same on all ranks. Empty before a run begins."""
        self.folder_id = ""
        """The id of the folder of checkpoints."""
        self.commits: tuple[Commit, ...] = ()
        """The latest full checkpoints in the folder by step, as far as this rank knows: the coordinator does."""
        self.replica_bytes = 0
        """What the replicas of other hosts take here since the start before."""
        self.is_off = False
        """Whether this process keeps no images any more."""
        self.rank = rank
        self._names: WeakKeyDictionary[StagingArena, str] = WeakKeyDictionary()
        self._num_named = 0
        self._kept: set[str] = set()
        """The names that the keeper holds for this process."""
        self._trouble = ""
        """Why the keeper cannot be used; empty while it can."""
        self._pid = os.getpid()
        self._num_keepers = 1
        self._also: Callable[[], list[int]] = list
        self._lock = threading.Lock()
        self._starting: threading.Thread | None = None

    def begin(self, start: str, folder_id: str) -> None:
        """Keep images of the start `start` from now on, also after they were turned off, if there is a `folder_id`."""
        self.start, self.folder_id = start, folder_id
        self.is_off, self._trouble, self._num_keepers = not folder_id, "", 1

    def note_committed(self, info: CheckpointInfo) -> None:
        """Note that this run committed the full checkpoint `info`. Coordinator, any thread."""
        commit = commit_of(info)
        if commit is not None:
            # After a rollback, steps beyond this one are not its predecessors.
            before = (each for each in self.commits if each.step < commit.step)
            self.commits = (*before, commit)[-MOST_COMMITS:]

    def begin_keeping(self, also: Callable[[], list[int]]) -> None:
        """Start the keeper and join it, in a thread; `also` returns the pids of this process's helpers. Idempotent."""
        if self._starting is None and not self.is_off:
            self._also = also
            try:
                self._starting = daemon("keeper", self._join)
            except OSError as error:
                self._turn_off(KeeperUnavailable(str(error)))

    def join_again(self, also: list[int]) -> None:
        """Let the keeper know that other helpers live now. Any thread."""
        self._try(lambda: self.keeper.join(self.start, also))

    def keep(self, arena: StagingArena) -> bool:
        """Have the keeper hold `arena`, unless it does; return whether it does. Any thread; waits for its start."""
        if self._starting is not None:
            self._starting.join()
        with self._lock:
            if self._starting is None or self.is_off or arena.mark is None:
                return False
            if self.keeper.has_ended():
                self._start_again()
            if not arena.is_kept:
                # With the id of this start, because the keeper may still hold arenas of the start before under its
                # names.
                self._names[arena] = f"{self.start}.{self.rank}.{self._num_named}"
                self._num_named += 1
                self._hold(arena)
            return arena.is_kept

    def drop_names(self, names: Sequence[str]) -> None:
        """Have the keeper let go of what it holds under `names`, of a start before this one. Any thread."""
        if names:
            self._try(lambda: self.keeper.drop(names))

    def give_up(self, arena: StagingArena) -> None:
        """Have the keeper let go of `arena`, whose image is of no use any more. Any thread."""
        if arena.mark is not None:
            arena.mark.clear()
        with self._lock:
            if arena.is_kept:
                arena.is_kept = False
                name = self._names.pop(arena)
                self._kept.discard(name)
                self._try(lambda: self.keeper.drop([name]))

    def leave(self) -> None:
        """Let the images outlive this process, for the time that the configuration says. Idempotent."""
        self.keeper.hurry()
        if self._starting is not None:
            self._starting.join()
            self._starting = None
            if self._try(self.keeper.leave):
                self.end_at_exit()
        self._forget_kept()

    def end_at_exit(self) -> None:
        """Say that images stay, and how to free them, on rank 0. Forked children say nothing."""
        if self._kept and not self.rank and os.getpid() == self._pid:
            how = "In-memory snapshots stay for the next start, for %g s. To free them: torchtitan-lite memory %s --end"
            logger.info(how, self.keeper.ttl_seconds, shlex.quote(str(self.keeper.folder)))

    def finish(self) -> None:
        """Free all images, because the run has finished: no start will need them. Idempotent."""
        self.keeper.hurry()
        if self._starting is not None:
            self._starting.join()
        # An image that is ready only now must not start another keeper.
        with self._lock:
            pid = self.keeper.pid
            try:
                if not self.is_off:
                    self.keeper.finish()
                    self._kept.clear()
            except KeeperUnavailable as error:
                self._trouble = error.reason
            if self._trouble and self._kept and not self.keeper.has_ended():
                text = (
                    "Rank %d: %s. Nothing of the run is lost, but its in-memory snapshots stay until %g s after its "
                    "processes have ended and the keeper runs again. To free them at once: kill -KILL %d"
                )
                logger.warning(text, self.rank, self._trouble, self.keeper.ttl_seconds, pid)
            self.is_off = True
            # So that whoever has an arena frees its memory with it.
            for arena in self._names:
                arena.is_kept = False
        self._forget_kept()

    def _join(self) -> bool:
        def start() -> None:
            self.keeper.start()
            self.keeper.join(self.start, self._also())

        return self._try(start)

    def _start_again(self) -> None:
        """Start a keeper in place of the one that has ended, and have it hold all arenas of this process."""
        arenas = [arena for arena in self._names if arena.is_kept]
        for arena in arenas:
            arena.is_kept = False
        if self._num_keepers == MOST_KEEPERS:
            self.is_off = True
            text = "Rank %d: the process that holds in-memory snapshots was killed %d times. A restart loads from disk"
            logger.warning(text, self.rank, self._num_keepers)
            return
        self._num_keepers += 1
        self._kept.clear()
        logger.info("Rank %d: the process that holds in-memory snapshots was killed; starting another one", self.rank)
        if self._join():
            for arena in arenas:
                self._hold(arena)

    def _hold(self, arena: StagingArena) -> None:
        mark = arena.mark
        if mark is not None and not arena.is_closed:
            arena.is_kept = self._try(lambda: self.keeper.keep(self._names[arena], (arena.fd, mark.fd)))
            if arena.is_kept:
                if not self._kept:
                    atexit.register(self.end_at_exit)
                self._kept.add(self._names[arena])

    def _forget_kept(self) -> None:
        self._kept.clear()
        atexit.unregister(self.end_at_exit)

    def _try(self, act: Callable[[], None]) -> bool:
        """Return whether `act` succeeded; turn the tier off if it did not, unless the keeper was killed meanwhile."""
        if self.is_off:
            return False
        try:
            act()
        except KeeperUnavailable as error:
            # Else the next image starts another one.
            if not self.keeper.has_ended():
                self._turn_off(error)
            return False
        return True

    def _turn_off(self, error: KeeperUnavailable) -> None:
        self.is_off, self._trouble = True, error.reason
        logger.warning("Rank %d: %s. A restart loads from disk", self.rank, error)
