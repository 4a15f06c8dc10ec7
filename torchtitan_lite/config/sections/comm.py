"""The section [comm]: deadlines of communication."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_lite.config.checks import at_least
from torchtitan_lite.config.field_types import check_types


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Deadlines of communication."""

    init_timeout_seconds: int = 300
    """Of collectives until the first step of this start is over."""

    train_timeout_seconds: int = 100
    """Of collectives after it."""

    trace_buf_size: int = 20000
    """Entries in NCCL's flight recorder; 0: off."""

    def __post_init__(self) -> None:
        check_types(self, "comm")
        at_least("comm.init_timeout_seconds", self.init_timeout_seconds, 1)
        at_least("comm.train_timeout_seconds", self.train_timeout_seconds, 1)
