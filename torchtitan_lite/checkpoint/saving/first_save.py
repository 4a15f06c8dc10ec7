"""That a loop does not save over the steps of a run which it did not load.

A loop that forgets `load()` would replace the run in its folder step by step, and the next start
would go on with whichever step is higher. So before the first save, and before anything is trained
where the loop calls `reset()`, the folder is looked at once. A loop that called `load()` has chosen,
whatever came of it.
"""

from __future__ import annotations

from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.distributed.consensus import Peers
from torchtitan_lite.errors import RunNotLoaded
from torchtitan_lite.store.store import CheckpointStore


class FirstSave:
    """Whether saves into `store` may begin."""

    def __init__(self, store: CheckpointStore, config: Checkpoint, peers: Peers) -> None:
        self._store = store
        self._peers = peers
        # A seed checkpoint is made without loading, beside whatever is there.
        self._is_allowed = config.load_only or config.create_seed_checkpoint

    def allow(self) -> None:
        """What is in the folder was loaded, or looked at by `load`. Any rank."""
        self._is_allowed = True

    def check(self) -> None:
        """Raise `RunNotLoaded` on every rank if the folder has another run's steps. **Collective** the first time."""
        if self._is_allowed:
            return
        steps = self._peers.on_coordinator(lambda: [info.step for info in self._store.committed()])
        if steps:
            raise RunNotLoaded(str(self._store.root), steps)
        self._is_allowed = True
