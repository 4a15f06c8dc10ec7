"""What every part of a run needs to act together with the other ranks and to be heard of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.events import Emit


@dataclass(frozen=True)
class RunContext:
    """The same for all parts of a run on this rank."""

    config: Checkpoint
    peers: Peers
    clock: Callable[[], float]
    """Returns seconds, from any zero."""
    emit: Emit
