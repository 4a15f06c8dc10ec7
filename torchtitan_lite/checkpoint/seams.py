"""What a caller of the manager may hand in, in place of what the configuration names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan_lite.checkpoint.saving.savers import Saver
from torchtitan_lite.checkpoint.schedule.interval import SavePolicy
from torchtitan_lite.checkpoint.schedule.optimum import Past
from torchtitan_lite.checkpoint.schedule.preemption import PreemptionWatch
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.distributed.step_consensus import StepConsensus
from torchtitan_lite.events import EventListener
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.store.retention import RetentionPolicy


@dataclass(frozen=True)
class Seams:
    """Parts of a manager; None for those that the configuration names."""

    store: StoresCheckpoints | None = None
    saver: Saver | None = None
    save_policy: SavePolicy | None = None
    retention: RetentionPolicy | None = None
    consensus: StepConsensus | None = None
    """Like `peers`, not closed by the manager."""
    peers: Peers | None = None
    preemption: PreemptionWatch | None = None
    clock: Callable[[], float] | None = None
    """Returns seconds, from any zero: by default `time.monotonic`."""
    on_event: EventListener | None = None
    past: Callable[[], Past] | None = None
    """Returns what is known of earlier starts, for `interval_type="auto"`, on rank 0."""
