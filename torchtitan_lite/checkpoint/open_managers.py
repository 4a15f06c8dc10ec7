"""Guards of the folders that a manager opens: one manager of this process at a time, and all ranks in the same ones.

The latest manager that opened a folder has it. A cell of a notebook is run again, or a script tries again after an
error, while the earlier manager is open, perhaps with a save in flight. To the lease both are this process. So the
second closes the first, as the end of its `with` would, and nothing that the first began is lost. Which ranks find a
manager that was dropped without `close` depends on the garbage collector: closing exchanges nothing that was not sent
before.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchtitan_lite.checkpoint.run_folders import RunFolders
from torchtitan_lite.checkpoint.saving.in_flight import InFlightSave
from torchtitan_lite.checkpoint.schedule.preemption import PreemptionWatch
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.distributed.host_mismatch import HostView, SharedFolder, alike, build_facts, versions_and_config
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import logger
from torchtitan_lite.stores import look_seconds


@dataclass
class OneOpener:
    """One manager, as the folders that it opens know it. Any rank; main thread only."""

    folders: RunFolders
    watch: PreemptionWatch
    in_flight: weakref.ref[InFlightSave]
    """Weak, like `close`: what is in this module keeps no model and no optimizer alive."""
    close: Callable[[], Callable[[], None] | None]
    """Returns the method that closes the manager, None if the manager was dropped."""
    is_replaced: bool = False
    """Whether another manager of this process has opened a folder of this one since."""

    def open(self) -> None:
        """Note that this manager opens its folders; close the managers that have one of them open."""
        self.is_replaced = False
        for identity, address in zip(self.folders.identities, self.folders.addresses, strict=True):
            former = _OPEN.get(identity)
            if former is not None and former is not self:
                former.give_way(address)
            _OPEN[identity] = self

    def note_closed(self) -> None:
        """Note that the manager is closed. Idempotent."""
        for identity in [identity for identity, opener in _OPEN.items() if opener is self]:
            del _OPEN[identity]

    def refuse_if_replaced(self) -> None:
        """Raise ConfigError if another manager has opened a folder of this one: its steps would be saved over."""
        if self.is_replaced:
            raise ConfigError(
                f"another manager of this process opened {self.folders.checkpoints.address} after this one, which was "
                "closed then. Use the other one; to continue with this one from what is saved there, call its load(); "
                "for two runs at once, give each a folder of its own."
            )

    def give_way(self, folder: str) -> None:
        """Close the manager after its save is durable. What fails is logged: who opens `folder` continues."""
        self.is_replaced = True
        self.note_closed()
        logger.warning(
            "Closing the manager that this process opened earlier on %s, because another one opens it. "
            "Use managers in a with statement, or call close()",
            folder,
        )
        try:
            if (close := self.close()) is not None:
                close()
            else:
                self._close_what_is_left()
        except Exception as error:
            logger.warning("The manager that this process opened earlier could not close: %s", error)

    def _close_what_is_left(self) -> None:
        """Close what a manager that was dropped has open: its save in flight runs in a thread."""
        if (in_flight := self.in_flight()) is not None:
            in_flight.outcome()
        self.watch.close()
        self.folders.release()


_OPEN: dict[str, OneOpener] = {}
"""The opener of each folder, by its identity, that a manager of this process has open."""


os.register_at_fork(after_in_child=_OPEN.clear)  # A child has no manager open.


# All ranks see the folders that the coordinator has taken: found at the start, not when the first save fails.
#
# Hosts may have folders of one path that are not one folder. The lock file that the coordinator just wrote has a random
# token, so every rank looks for that: nothing else is written, and nothing is left. A network file system may show a
# new file to other hosts late, so a rank that does not see it looks again. Who only loads takes no lock, and does not
# look.


_PAUSE_SECONDS = 0.5


def refuse_misfits(
    folders: RunFolders, tokens: Sequence[str], config: JobConfig, clock: tuple[float, float], peers: Peers
) -> None:
    """Raise `FolderNotShared` or `HostsDiffer` on every rank for what does not fit together. **Collective**.

    `tokens` are those of the locks of `folders`; `clock` is what `clock_around` returned. Raises `FolderUnusable` where
    a rank may not look: in an object store, for lack of credentials. Waits only where it does not see a lock.
    """
    needs_clock = config.checkpoint.keep_for_hours > 0 or not folders.are_all_on_disk

    def seen() -> list[SharedFolder]:
        unseen = find_unseen(lambda: folders.unseen(tokens), look_seconds(config.checkpoint.timeout_seconds))
        there = zip(folders.addresses, folders.mounts, tokens, strict=False)
        return [
            SharedFolder(address, mount, "" if number in unseen else token)
            for number, (address, mount, token) in enumerate(there)
        ]

    def view(seen: Sequence[SharedFolder]) -> HostView:
        return HostView({**versions_and_config(config), **build_facts()}, seen, clock=clock, needs_clock=needs_clock)

    alike(seen, view, peers)


def find_unseen(
    look: Callable[[], Sequence[int]],
    seconds: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Sequence[int]:
    """Return as soon as `look` finds nothing, else what it finds after `seconds`. Any rank."""
    until = clock() + seconds
    while (unseen := look()) and clock() < until:
        sleep(_PAUSE_SECONDS)
    return unseen
