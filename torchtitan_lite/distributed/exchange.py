"""Objects of all ranks, on their way to the coordinator and back, through one group."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TypeVar, cast

import torch
import torch.distributed as dist
import xxhash

from torchtitan_lite.distributed.host_tree import HostTree
from torchtitan_lite.distributed.lost_peer import naming_lost_peers
from torchtitan_lite.errors import SaveFailed
from torchtitan_lite.host_memory import host_id
from torchtitan_lite.log import counted

TREE_FROM = 64
"""From this number of ranks on, objects go over hosts; with fewer the exchanges of torch take fewer steps."""

T = TypeVar("T")
U = TypeVar("U")


class RanksFailed(Exception):
    """What failed, by rank: the same on all ranks, which have agreed on it, so their group is as it was."""

    def __init__(self, failures: Mapping[int, BaseException]) -> None:
        super().__init__(failures_text(failures))
        self.failures = failures


class Exchange:
    """The ranks of `group`, all ranks; None for the only process. All methods are **collective**.

    They raise PeerLost if another rank has ended.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank()
        self.size = 1 if group is None else dist.get_world_size()

    def gathered(self, mine: T) -> list[T] | None:
        """Return each rank's `mine`, by rank, on the coordinator; None on the others."""
        if self.size == 1:
            return [mine]
        if self.size >= TREE_FROM:
            parts = self._tree.to_coordinator(pickle.dumps(mine))
            return None if parts is None else [pickle.loads(part) for part in parts]
        gathered: list[T | None] | None = [None] * self.size if self.rank == 0 else None
        with naming_lost_peers():
            dist.gather_object(mine, gathered, dst=0, group=self.group)
        return cast("list[T] | None", gathered)

    def gathered_by_all(self, mine: T) -> list[T]:
        """Return each rank's `mine`, by rank, on every rank."""
        if self.size == 1:
            return [mine]
        if self.size >= TREE_FROM:
            parts = self._tree.to_coordinator(pickle.dumps(mine))
            all_parts = self._tree.from_coordinator_to_all(None if parts is None else pickle.dumps(parts))
            return [pickle.loads(part) for part in pickle.loads(all_parts)]
        gathered: list[T | None] = [None] * self.size
        with naming_lost_peers():
            dist.all_gather_object(gathered, mine, group=self.group)
        return cast(list[T], gathered)

    def scattered(self, by_rank: list[T] | None) -> T:
        """Return this rank's one of what the coordinator gives, by rank."""
        if self.size == 1:
            return cast("list[T]", by_rank)[0]
        if self.size >= TREE_FROM:
            parts = None if by_rank is None else [pickle.dumps(each) for each in by_rank]
            return cast(T, pickle.loads(self._tree.from_coordinator(parts)))
        received: list[T | None] = [None]
        with naming_lost_peers():
            dist.scatter_object_list(received, by_rank, src=0, group=self.group)
        return cast(T, received[0])

    def from_coordinator(self, value: T | None) -> T:
        """Return what the coordinator gives."""
        message = [value]
        if self.size > 1:
            with naming_lost_peers():
                dist.broadcast_object_list(message, src=0, group=self.group)
        return cast(T, message[0])

    def decide(self, make: Callable[[], T], choose: Callable[[list[T]], U]) -> U:
        """Return on every rank what `choose` returns on the coordinator, of what `make` returns on each rank.

        Raises `RanksFailed` on every rank if either raised on any. A `KeyboardInterrupt` is a failure like others.
        """
        mine: T | None = None
        own: BaseException | None = None
        try:
            mine = make()
        except BaseException as error:
            own = error
        gathered = self.gathered((mine, portable(own)))
        outcome: tuple[U | None, dict[int, BaseException]] | None = None
        if gathered is not None:
            chosen: U | None = None
            failures = {rank: error for rank, (_, error) in enumerate(gathered) if error is not None}
            if not failures:
                try:
                    chosen = choose([cast(T, value) for value, _ in gathered])
                except BaseException as error:
                    own = error
                    failures = {0: cast(BaseException, portable(error))}
            outcome = chosen, failures
        chosen, failures = self.from_coordinator(outcome)
        if failures:
            if self.rank in failures and own is not None:
                failures[self.rank] = own  # With its traceback.
            raise RanksFailed(failures)
        return cast(U, chosen)

    @cached_property
    def _tree(self) -> HostTree:
        assert self.group is not None, "there are several ranks"
        host = xxhash.xxh3_64_intdigest(host_id().encode()) >> 1
        return HostTree(self.gathered_numbers(host), self.group)

    def gathered_numbers(self, mine: int) -> list[int]:
        """Return each rank's `mine`, of 63 bits, by rank, on every rank."""
        if self.size == 1:
            return [mine]
        own = torch.tensor([mine], dtype=torch.int64, device="cpu")
        numbers = [torch.zeros_like(own) for _ in range(self.size)]
        with naming_lost_peers():
            dist.all_gather(numbers, own, group=self.group)
        return [int(number) for number in numbers]


def portable(error: BaseException | None) -> BaseException | None:
    """Return `error`; in its place a RuntimeError with its text, if pickle cannot carry it.

    An error that cannot be pickled would leave the other ranks waiting; one that cannot be unpickled would be lost.
    """
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def failures_text(failures: Mapping[int, BaseException]) -> str:
    """Return `failures` in words: of three ranks, and the number of the rest."""
    causes = [f"rank {rank}: {_cause_text(cause)}" for rank, cause in sorted(failures.items())]
    return "; ".join(causes[:3]) + (f"; and {counted(len(causes) - 3, 'more rank')}" if len(causes) > 3 else "")


def _cause_text(cause: BaseException) -> str:
    """Return `cause` with its kind; of a failed save only why, because the error that it goes into says the rest."""
    return cause.cause if isinstance(cause, SaveFailed) else f"{type(cause).__name__}: {cause}"
