"""Keeps a loop from saving over the steps of a run that it did not load.

A loop that forgets `load()` would replace the run in its folder step by step, and the next start
would resume from whichever step is higher. So the coordinator lists the folder once, before the first
save, or before training where the loop calls `reset()`. After a call to `load()` saves are allowed,
whatever it loaded: the loop has made its choice.
"""

from __future__ import annotations

from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import RunNotLoaded
from torchtitan_lite.store.store import CheckpointStore


class FirstSave:
    """Decides whether saves into `store` may begin."""

    def __init__(self, store: CheckpointStore, config: Checkpoint, peers: Peers) -> None:
        self._store = store
        self._peers = peers
        # A seed checkpoint is made without loading, next to whatever is in the folder.
        self._is_allowed = config.load_only or config.create_seed_checkpoint

    def allow(self) -> None:
        """Allow saves: `load` has looked at the folder. Any rank."""
        self._is_allowed = True

    def check(self) -> None:
        """Raise `RunNotLoaded` on every rank if the folder has steps that were not loaded.

        **Collective** until saves are allowed.
        """
        if self._is_allowed:
            return
        steps = self._peers.on_coordinator(lambda: [info.step for info in self._store.committed()])
        if steps:
            raise RunNotLoaded(str(self._store.root), steps)
        self._is_allowed = True
