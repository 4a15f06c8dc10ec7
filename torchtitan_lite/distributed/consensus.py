"""What the ranks agree on, and how.

`StepConsensus` carries each rank's facts to all ranks once a step without making anyone wait: what
is sent at the end of step k is received at the end of step k+1, the same on every rank, so a
decision that follows from it is the same everywhere. `Peers` is for the rare moments when one rank
decides for all (which checkpoint to load) or one rank's refusal must be everyone's.

Each has a gloo group of its own: two threads on one group corrupt it, and checkpoint traffic runs
in a thread beside the training. Without a process group both work for the one process there is.
All methods are collective unless they say otherwise.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from torchtitan_lite.errors import TorchtitanLiteError

T = TypeVar("T")


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@dataclass(frozen=True)
class Facts:
    """What one rank knows at the end of a step; agreed facts are the OR (for the signal, the highest)."""

    save_due: bool = False
    save_failed: bool = False
    signal: int = 0

    def to_tensor(self) -> torch.Tensor:
        return torch.tensor([self.save_due, self.save_failed, self.signal], dtype=torch.int64)

    @staticmethod
    def from_tensor(values: torch.Tensor) -> Facts:
        save_due, save_failed, signal = values.tolist()
        return Facts(save_due=bool(save_due), save_failed=bool(save_failed), signal=signal)


class StepConsensus:
    """One exchange of `Facts` a step, received one step later. `timeout` bounds each wait."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._under_way: tuple[dist.Work | None, torch.Tensor] | None = None

    def receive(self) -> Facts:
        """The ORed facts of the last `send`; none before the first."""
        if self._under_way is None:
            return Facts()
        work, values = self._under_way
        self._under_way = None
        if work is not None:
            work.wait(self._timeout)
        return Facts.from_tensor(values)

    def send(self, mine: Facts) -> None:
        """Sets off the exchange of this rank's facts; does not wait for the others."""
        assert self._under_way is None, "receive() comes before the next send()"
        values = mine.to_tensor()
        work = (
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
            if _world_size() > 1
            else None
        )
        self._under_way = (work, values)

    def drain(self) -> None:
        """Waits for an exchange under way: no rank may destroy the group before."""
        self.receive()

    @cached_property
    def _group(self) -> dist.ProcessGroup | None:
        return _gloo_group(self._timeout)


class Peers:
    """All ranks of the job as checkpoint code sees them. `timeout` bounds each collective."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def rank(self) -> int:
        """This rank, 0 without a process group. Not collective."""
        return dist.get_rank() if _world_size() > 1 else 0

    @property
    def world_size(self) -> int:
        """Number of ranks. Not collective."""
        return _world_size()

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank looks at the folder and commits. Not collective."""
        return self.rank == 0

    @cached_property
    def group(self) -> dist.ProcessGroup | None:
        """The gloo group of checkpoint traffic; None without a process group."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        return _gloo_group(self._timeout)

    def decide(self, choose: Callable[[], T]) -> T:
        """What `choose` returned on the coordinator, on every rank; what it raised is raised on every rank."""
        outcome: list[tuple[T | None, Exception | None]] = [(None, None)]
        own: Exception | None = None
        if self.is_coordinator:
            try:
                outcome = [(choose(), None)]
            except Exception as error:
                own, outcome = error, [(None, _portable(error))]
        if self.world_size > 1:
            dist.broadcast_object_list(outcome, src=0, group=self.group)
        value, failure = outcome[0]
        if failure is not None:
            raise own if own is not None else _told_by_another(failure)
        return cast(T, value)

    def gather(self, mine: T) -> list[T]:
        """Each rank's `mine`, by rank, on every rank."""
        if self.world_size == 1:
            return [mine]
        gathered: list[T | None] = [None] * self.world_size
        dist.all_gather_object(gathered, mine, group=self.group)
        return cast(list[T], gathered)

    def raise_together(self, error: Exception | None) -> None:
        """Returns if no rank brought an error; else raises the first one, by rank, on every rank.

        It is the first rank that tells a person of it, whosever it is: of the others the launcher may show nothing.
        """
        errors: list[Exception | None] = [error]
        if self.world_size > 1:
            errors = [None] * self.world_size
            dist.all_gather_object(errors, error and _portable(error), group=self.group)
        for rank, found in enumerate(errors):
            if found is not None:
                own = error if rank == self.rank and error is not None else found
                if isinstance(own, TorchtitanLiteError):
                    own.of_rank, own.told_elsewhere = rank, not self.is_coordinator
                raise own


def _gloo_group(timeout: timedelta) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


def _portable(error: Exception) -> Exception:
    # An error that does not pickle would leave the other ranks waiting, and one that does not unpickle, without it.
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _told_by_another(error: Exception) -> Exception:
    if isinstance(error, TorchtitanLiteError):
        error.told_elsewhere = True
    return error
