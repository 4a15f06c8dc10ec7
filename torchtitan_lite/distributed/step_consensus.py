"""The flags of all ranks, exchanged once a step without waiting.

What is sent at the end of step k is received at the end of step k+1, the same on every rank, so a decision that follows
from it is the same everywhere. An exchange that blocks would have every step wait for the slowest rank. The exchange
has a gloo group of its own, which is created when it is first needed and has threads and sockets until `close`. Without
a process group it works for the only process. All methods are **collective** unless they say otherwise.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchtitan_lite.distributed.groups import destroy, gloo_group, world_size
from torchtitan_lite.distributed.lost_peer import naming_lost_peers


class StepFlags(NamedTuple):
    """The flags of one rank at the end of a step. Agreed flags are the OR, of numbers the maximum."""

    save_due: bool = False
    save_failed: bool = False
    step_in_flight: int = -1
    """The step whose save is in flight; -1 for none."""
    signal: int = 0
    policy_failed: bool = False
    """Whether the save policy of a rank gave no answer."""


class StepConsensus:
    """Exchanges `StepFlags` once a step, and receives them one step later. `timeout` bounds each wait."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._in_flight: tuple[dist.Work | None, torch.Tensor] | None = None

    def receive(self) -> StepFlags:
        """Return the agreed flags of the last `send`; no flags before the first one.

        Call it before any rank destroys the group, too: an exchange may be in flight.
        """
        if self._in_flight is None:
            return StepFlags()
        work, values = self._in_flight
        self._in_flight = None
        if work is not None:
            with naming_lost_peers():
                work.wait(self._timeout)
        kinds = map(type, StepFlags())
        return StepFlags(*(kind(value) for kind, value in zip(kinds, values.tolist(), strict=True)))

    def send(self, mine: StepFlags) -> None:
        """Start the exchange of this rank's flags; do not wait for the other ranks."""
        assert self._in_flight is None, "call receive() before the next send()"
        # Not waited for: a blocking exchange would make every step wait for the slowest rank. By the end of the next
        # step, when it is received, it is long over.
        values = torch.tensor(mine, dtype=torch.int64, device="cpu")
        work = (
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
            if world_size() > 1
            else None
        )
        self._in_flight = (work, values)

    def close(self) -> None:
        """Destroy the group, after `receive`; the next `send` creates another one. Idempotent; waits for no rank."""
        destroy(self.__dict__.pop("_group", None))

    @cached_property
    def _group(self) -> dist.ProcessGroup | None:
        return gloo_group(self._timeout)
