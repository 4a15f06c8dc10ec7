"""Keeps a loop from saving over the steps of a run that it did not load.

A loop that forgets `load()` would replace the run in its folder step by step, and the next start
would resume from whichever step is higher. So the coordinator lists the folder once, before the first
save, or before training where the loop calls `reset()`. After a call to `load()` saves are allowed,
whatever it loaded: the loop has made its choice. A manager that was closed and is used again may save if
nothing came into the folder meanwhile; another job may have trained on from there.
"""

from __future__ import annotations

from collections.abc import Callable

from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import RunNotLoaded
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.stores import usable


class FirstSave:
    """Decides whether saves into `store` may begin."""

    def __init__(self, store: StoresCheckpoints, config: Checkpoint, peers: Peers) -> None:
        self._store = store
        self._peers = peers
        # A seed checkpoint is made without loading, next to whatever is in the folder.
        self._is_exempt = config.load_only or config.create_seed_checkpoint
        self._is_allowed = self._is_exempt
        self._left: frozenset[tuple[int, float, str]] = frozenset()
        """On the coordinator, what was in the folder when this job gave it up."""

    def allow(self) -> None:
        """Allow saves: `load` has looked at the folder. Any rank."""
        self._is_allowed = True

    def leave(self, fence: Callable[[], None]) -> None:
        """Note what is in the folder, which this job gives up now; `fence` raises if it has lost it. Any rank."""
        if not self._is_allowed or self._is_exempt:
            return
        self._is_allowed = False
        if not self._peers.is_coordinator:
            return
        try:
            fence()
            self._left = frozenset(self._present())
        except Exception:
            # It is not known what is there: the loop has to load.
            self._left = frozenset()

    def check(self) -> None:
        """Raise `RunNotLoaded` on every rank if the folder has steps that were not loaded.

        **Collective** until saves are allowed.
        """
        if self._is_allowed:
            return
        steps = self._peers.on_coordinator(lambda: [each[0] for each in self._present() if each not in self._left])
        if steps:
            raise RunNotLoaded(str(self._store.address), steps)
        self._is_allowed = True

    def _present(self) -> list[tuple[int, float, str]]:
        with usable(self._store.address):
            return [(info.step, info.created_at, info.run_id) for info in self._store.committed()]
