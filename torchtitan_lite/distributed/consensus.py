"""What the ranks agree on, and how.

`StepConsensus` carries each rank's facts to all ranks once a step without making anyone wait: what
is sent at the end of step k is received at the end of step k+1, the same on every rank, so a
decision that follows from it is the same everywhere. `Peers` is for the rare moments when one rank
decides for all (which checkpoint to load) or one rank's refusal must be everyone's.

Each has gloo groups of its own: two threads on one group corrupt it, and checkpoint traffic runs
in a thread beside the training. Without a process group both work for the one process there is.
All methods are collective unless they say otherwise.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from torchtitan_lite.errors import TorchtitanLiteError

GROUP_DESC = "checkpoint"
"""What torch's own diagnostics, its flight recorder for one, call the groups of this module."""

T = TypeVar("T")
U = TypeVar("U")


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@dataclass(frozen=True)
class StepFlags:
    """What one rank knows at the end of a step; agreed facts are the OR (of numbers, the highest)."""

    save_due: bool = False
    save_failed: bool = False
    step_in_flight: int = -1
    """The step that is being saved; -1 for none."""
    signal: int = 0

    def to_tensor(self) -> torch.Tensor:
        facts = [self.save_due, self.save_failed, self.step_in_flight, self.signal]
        return torch.tensor(facts, dtype=torch.int64, device="cpu")

    @staticmethod
    def from_tensor(values: torch.Tensor) -> StepFlags:
        save_due, save_failed, step_in_flight, signal = values.tolist()
        return StepFlags(
            save_due=bool(save_due),
            save_failed=bool(save_failed),
            step_in_flight=step_in_flight,
            signal=signal,
        )


class StepConsensus:
    """One exchange of `StepFlags` a step, received one step later. `timeout` bounds each wait."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._under_way: tuple[dist.Work | None, torch.Tensor] | None = None

    def receive(self) -> StepFlags:
        """The ORed facts of the last `send`; none before the first."""
        if self._under_way is None:
            return StepFlags()
        work, values = self._under_way
        self._under_way = None
        if work is not None:
            work.wait(self._timeout)
        return StepFlags.from_tensor(values)

    def send(self, mine: StepFlags) -> None:
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
    """All ranks of the job as checkpoint code sees them. `timeout` bounds each collective.

    It has two groups: `group` is for the thread that saves, and what the caller's thread asks goes through another.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._save_group: dist.ProcessGroup | None = None
        self.is_group_in_doubt = False
        """Whether this rank has seen `group` fail, or a thread hang in it. Set by who sees it; not collective."""

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

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The gloo group of saves and loads, made when it is first asked for; None without a process group."""
        if self._save_group is None and dist.is_available() and dist.is_initialized():
            self._save_group = _gloo_group(self._timeout)
        return self._save_group

    def renew_group(self) -> None:
        """`group` is another one: a collective that failed or timed out may have left the old one of no use.

        The old one stays: a thread may still hang in it.
        """
        self.is_group_in_doubt = False
        self._save_group = None
        _ = self.group

    @cached_property
    def _talk(self) -> dist.ProcessGroup:
        return _gloo_group(self._timeout)

    def on_coordinator(self, choose: Callable[[], T]) -> T:
        """What `choose` returned on the coordinator, on every rank; what it raised is raised on every rank."""
        outcome: list[tuple[T | None, Exception | None]] = [(None, None)]
        own: Exception | None = None
        if self.world_size > 1:
            _ = self._talk  # Made before choosing: who waits for a group to be made is not told of a peer's end.
        if self.is_coordinator:
            try:
                outcome = [(choose(), None)]
            except Exception as error:
                own, outcome = error, [(None, _portable(error))]
        if self.world_size > 1:
            dist.broadcast_object_list(outcome, src=0, group=self._talk)
        value, failure = outcome[0]
        if failure is not None:
            raise own if own is not None else _reported_elsewhere(failure)
        return cast(T, value)

    def gather(self, mine: T) -> list[T]:
        """Each rank's `mine`, by rank, on every rank."""
        if self.world_size == 1:
            return [mine]
        gathered: list[T | None] = [None] * self.world_size
        dist.all_gather_object(gathered, mine, group=self._talk)
        return cast(list[T], gathered)

    def together(self, make: Callable[[], T]) -> T:
        """What `make` returned on this rank; raises on every rank what it raised on one, as `raise_together`."""
        made: T | None = None
        error: Exception | None = None
        try:
            made = make()
        except Exception as raised:
            error = raised
        self.raise_together(error)
        return cast(T, made)

    def gather_made(self, make: Callable[[], T]) -> list[T]:
        """What `make` returned on each rank, by rank; raises what it raised on one. One exchange for both."""
        made: T | None = None
        error: Exception | None = None
        try:
            made = make()
        except Exception as raised:
            error = raised
        if self.world_size == 1:
            self._raise_first([error], error)
            return [cast(T, made)]
        outcomes = self.gather((made, error and _portable(error)))
        self._raise_first([found for _, found in outcomes], error)
        return [cast(T, value) for value, _ in outcomes]

    def max_over_ranks(self, *mine: int) -> tuple[int, ...]:
        """Of each of the numbers the highest of all ranks', on every rank."""
        if self.world_size == 1:
            return mine
        values = torch.tensor(mine, dtype=torch.int64, device="cpu")
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._talk)
        return tuple(values.tolist())

    def scatter_answers(self, mine: T, answer: Callable[[list[T]], list[U]]) -> U:
        """This rank's part of what the coordinator answers to each rank's `mine`, by rank; raises what it raised."""
        if self.world_size == 1:
            return answer([mine])[0]
        if isinstance(mine, Exception):
            mine = cast(T, _portable(mine))
        questions: list[T | None] | None = [None] * self.world_size if self.is_coordinator else None
        dist.gather_object(mine, questions, dst=0, group=self._talk)
        answers: list[tuple[U | None, Exception | None]] | None = None
        own: Exception | None = None
        if self.is_coordinator:
            try:
                answers = [(given, None) for given in answer(cast(list[T], questions))]
            except Exception as error:
                own, answers = error, [(None, _portable(error))] * self.world_size
        received: list[tuple[U | None, Exception | None]] = [(None, None)]
        dist.scatter_object_list(received, answers, src=0, group=self._talk)
        value, failure = received[0]
        if failure is not None:
            raise own if own is not None else _reported_elsewhere(failure)
        return cast(U, value)

    def raise_together(self, error: Exception | None) -> None:
        """Returns if no rank brought an error; else raises the first one, by rank, on every rank.

        It is the first rank that tells a person of it, whosever it is: of the others the launcher may show nothing.
        """
        errors: list[Exception | None] = [error]
        if self.world_size > 1:
            errors = [None] * self.world_size
            dist.all_gather_object(errors, error and _portable(error), group=self._talk)
        self._raise_first(errors, error)

    def _raise_first(self, errors: Sequence[Exception | None], error: Exception | None) -> None:
        """Raise the first of `errors`, which are by rank; this rank's is `error`."""
        for rank, found in enumerate(errors):
            if found is not None:
                own = error if rank == self.rank and error is not None else found
                if isinstance(own, TorchtitanLiteError):
                    own.origin_rank, own.reported_elsewhere = rank, not self.is_coordinator
                raise own


def _gloo_group(timeout: timedelta) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout, group_desc=GROUP_DESC)
    return group


def _portable(error: Exception) -> Exception:
    # An error that does not pickle would leave the other ranks waiting, and one that does not unpickle, without it.
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _reported_elsewhere(error: Exception) -> Exception:
    if isinstance(error, TorchtitanLiteError):
        error.reported_elsewhere = True
    return error
