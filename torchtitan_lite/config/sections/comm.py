"""The section [comm]: timeouts of collectives, their trace, and ranks that are only simulated."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_lite.config.checks import at_least
from torchtitan_lite.config.field_types import check_types


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Timeouts of collectives, their trace, and ranks that are only simulated."""

    init_timeout_seconds: int = 300
    """Timeout of collectives, in seconds, until the first step after this start is done."""

    train_timeout_seconds: int = 100
    """Timeout of collectives, in seconds, after the first step."""

    trace_buf_size: int = 20000
    """Entries in NCCL's flight recorder; 0: off."""

    simulated_ranks: int = 0
    """With checkpoint.dry_run: act as rank 0 of this many ranks, in one process and without the others; 0: off."""

    def __post_init__(self) -> None:
        check_types(self, "comm")
        at_least("comm.init_timeout_seconds", self.init_timeout_seconds, 1)
        at_least("comm.train_timeout_seconds", self.train_timeout_seconds, 1)
        at_least("comm.simulated_ranks", self.simulated_ranks, 0)
