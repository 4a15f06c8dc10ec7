"""All ranks of the job, where one decides for all, or where the error of one must be raised on all.

These are the rare exchanges: which checkpoint to load, whether the plan of a save holds. They have gloo groups of their
own, which are created when they are first needed and have threads and sockets until `close`. Without a process group
everything works for the only process. All methods are **collective** unless they say otherwise, and raise PeerLost if
another rank has ended.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import cached_property, partial
from typing import TypeVar, cast

import torch
import torch.distributed as dist
import xxhash

from torchtitan_lite.distributed.groups import destroy, gloo_group, world_size
from torchtitan_lite.distributed.host_tree import HostTree
from torchtitan_lite.distributed.lost_peer import naming_lost_peers
from torchtitan_lite.errors import TorchtitanLiteError
from torchtitan_lite.host_memory import host_id

TREE_FROM = 64
"""From this number of ranks on, objects go over hosts; with fewer the exchanges of torch take fewer steps."""

T = TypeVar("T")
U = TypeVar("U")


class Peers:
    """All ranks of the job, for checkpoint code. `timeout` bounds each collective.

    It has two groups: `group` is for the thread that saves; the collectives of the main thread go through the other
    one.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._save_group: dist.ProcessGroup | None = None
        self.is_group_in_doubt = False
        """Whether `group` failed on this rank, or a thread hangs in it. Callers set it; not collective."""

    @property
    def rank(self) -> int:
        """Return this rank; 0 without a process group. Not collective."""
        return dist.get_rank() if world_size() > 1 else 0

    @property
    def world_size(self) -> int:
        """Return the number of ranks. Not collective."""
        return world_size()

    @property
    def is_coordinator(self) -> bool:
        """Return whether this rank reads the folder and commits. Not collective."""
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Return the gloo group of saves, created on the first access; None without a process group."""
        if self._save_group is None and dist.is_available() and dist.is_initialized():
            self._save_group = gloo_group(self._timeout)
        return self._save_group

    def renew_group(self) -> None:
        """Replace `group`: a collective that failed or timed out may have left the old one unusable.

        The old group stays: a thread may still hang in it.
        """
        self.is_group_in_doubt = False
        self._save_group = None
        _ = self.group

    def close(self) -> None:
        """Destroy the groups; the next exchange creates others. Idempotent; waits for no rank.

        This rank may be in no exchange. A group in doubt stays: a thread may still hang in it.
        """
        self.__dict__.pop("_tree", None)
        destroy(self.__dict__.pop("_control_group", None))
        if not self.is_group_in_doubt:
            destroy(self._save_group)
        self._save_group, self.is_group_in_doubt = None, False

    @cached_property
    def _control_group(self) -> dist.ProcessGroup:
        return gloo_group(self._timeout)

    @cached_property
    def _tree(self) -> HostTree:
        host = xxhash.xxh3_64_intdigest(host_id().encode()) >> 1
        return HostTree(self.gather_number(host), self._control_group)

    def on_coordinator(self, choose: Callable[[], T]) -> T:
        """Call `choose` on the coordinator; return its result on every rank, or raise its error on every rank."""
        if self.world_size > 1:
            # Create the group first: a rank that waits for its creation does not notice the end of a peer.
            _ = self._control_group
        chosen, own = _attempted(choose) if self.is_coordinator else (None, None)
        outcome = [(chosen, _picklable(own))]
        if self.world_size > 1:
            with naming_lost_peers():
                dist.broadcast_object_list(outcome, src=0, group=self._control_group)
        return _result(*outcome[0], own)

    def gather(self, mine: T) -> list[T]:
        """Return each rank's `mine`, by rank, on every rank."""
        if self.world_size == 1:
            return [mine]
        if self.world_size >= TREE_FROM:
            parts = self._tree.to_coordinator(pickle.dumps(mine))
            all_parts = self._tree.from_coordinator_to_all(None if parts is None else pickle.dumps(parts))
            return [pickle.loads(part) for part in pickle.loads(all_parts)]
        gathered: list[T | None] = [None] * self.world_size
        with naming_lost_peers():
            dist.all_gather_object(gathered, mine, group=self._control_group)
        return cast(list[T], gathered)

    def together(self, make: Callable[[], T]) -> T:
        """Return the result of `make` on this rank. If it raised on any rank, raise as `raise_together`."""
        made, error = _attempted(make)
        self.raise_together(error)
        return cast(T, made)

    def made_with_maxima(
        self, make: Callable[[], tuple[T, tuple[int, ...]]], num_numbers: int
    ) -> tuple[T, tuple[int, ...]]:
        """Return what `make` returns on this rank, with the maximum over all ranks of each of its `num_numbers`.

        If it raised on any rank, raise as `raise_together`; one exchange for both.
        """
        made, error = _attempted(make)
        failed, *maxima = self.max_over_ranks(error is not None, *(made[1] if made else [0] * num_numbers))
        if failed:
            self._raise_first(self.gather_errors(error), error)
        return cast("tuple[T, tuple[int, ...]]", made)[0], tuple(maxima)

    def gather_made(self, make: Callable[[], T]) -> list[T]:
        """Return the result of `make` of each rank, by rank, or raise as `together`; one exchange for both."""
        made, error = _attempted(make)
        if self.world_size == 1:
            self._raise_first([error], error)
            return [cast(T, made)]
        outcomes = self.gather((made, _picklable(error)))
        self._raise_first([found for _, found in outcomes], error)
        return [cast(T, value) for value, _ in outcomes]

    def max_over_ranks(self, *mine: int) -> tuple[int, ...]:
        """Return the maximum over all ranks of each number, on every rank."""
        if self.world_size == 1:
            return mine
        values = torch.tensor(mine, dtype=torch.int64, device="cpu")
        with naming_lost_peers():
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._control_group)
        return tuple(values.tolist())

    def gather_number(self, mine: int) -> list[int]:
        """Return each rank's `mine`, of 63 bits, by rank, on every rank."""
        if self.world_size == 1:
            return [mine]
        own = torch.tensor([mine], dtype=torch.int64, device="cpu")
        numbers = [torch.zeros_like(own) for _ in range(self.world_size)]
        with naming_lost_peers():
            dist.all_gather(numbers, own, group=self._control_group)
        return [int(number) for number in numbers]

    def on_all_ranks(self, mine: Collection[str], known: Sequence[str]) -> list[str]:
        """Return those of the names `known`, the same on each rank, that every rank has in `mine`. No name travels."""
        if self.world_size == 1:
            return [name for name in known if name in mine]
        has = torch.tensor([name in mine for name in known], dtype=torch.uint8, device="cpu")
        with naming_lost_peers():
            dist.all_reduce(has, op=dist.ReduceOp.MIN, group=self._control_group)
        return [known[at] for at in has.nonzero().flatten().tolist()]

    def scatter_answers(self, mine: T, answer: Callable[[list[T]], list[U]]) -> U:
        """Send each rank's `mine` to the coordinator; return this rank's part of what `answer` returns there.

        `answer` gets and returns lists by rank. What it raises is raised on every rank.
        """
        if self.world_size == 1:
            return answer([mine])[0]
        if isinstance(mine, Exception):
            mine = cast(T, _picklable(mine))
        gathered = self._gathered_on_coordinator(mine)
        outcomes: list[tuple[U | None, Exception | None]] | None = None
        own: Exception | None = None
        if gathered is not None:
            answers, own = _attempted(lambda: answer(gathered))
            by_rank: Sequence[U | None] = answers if answers is not None else [None] * self.world_size
            failure = _picklable(own)
            outcomes = [(given, failure) for given in by_rank]
        return _result(*self._scattered(outcomes), own)

    def _gathered_on_coordinator(self, mine: T) -> list[T] | None:
        """Return each rank's `mine`, by rank, on the coordinator; None on the others."""
        if self.world_size >= TREE_FROM:
            parts = self._tree.to_coordinator(pickle.dumps(mine))
            return None if parts is None else [pickle.loads(part) for part in parts]
        gathered: list[T | None] | None = [None] * self.world_size if self.is_coordinator else None
        with naming_lost_peers():
            dist.gather_object(mine, gathered, dst=0, group=self._control_group)
        return cast("list[T] | None", gathered)

    def _scattered(self, by_rank: list[T] | None) -> T:
        """Return this rank's one of what the coordinator gives, by rank."""
        if self.world_size >= TREE_FROM:
            parts = None if by_rank is None else [pickle.dumps(each) for each in by_rank]
            return cast(T, pickle.loads(self._tree.from_coordinator(parts)))
        received: list[T | None] = [None]
        with naming_lost_peers():
            dist.scatter_object_list(received, by_rank, src=0, group=self._control_group)
        return cast(T, received[0])

    def pass_on(self, mine: torch.Tensor, previous: int | None, following: int | None) -> torch.Tensor:
        """Return the tensor of the first rank of a chain: receive it from `previous`, send it to the rank `following`.

        `mine` is what the first rank, without a `previous`, sends, and elsewhere a tensor of the same size in the
        host's memory. **Collective** for the ranks of a chain; a rank in several goes through them in one order.
        """
        theirs = mine.contiguous() if previous is None else torch.empty_like(mine)
        self.relay(theirs, previous, following)()
        return theirs

    def relay(self, message: torch.Tensor, previous: int | None, following: int | None) -> Callable[[], object]:
        """Receive `message` from the rank `previous`, then begin to send it to the rank `following`; None: do not.

        Returns what waits until it was sent; it must not change before. **Collective** as `pass_on`.
        """
        sending: dist.Work | None = None
        with naming_lost_peers():
            if previous is not None:
                dist.recv(message, src=previous, group=self._control_group)
            if following is not None:
                sending = dist.isend(message, dst=following, group=self._control_group)
        return bool if sending is None else partial(_finish, sending)

    def swap(self, mine: torch.Tensor, previous: int, following: int) -> torch.Tensor:
        """Send `mine` to the rank `following`; return what the rank `previous` sends. **Collective** as `pass_on`."""
        theirs = torch.empty_like(mine)
        with naming_lost_peers():
            sending = dist.isend(mine, dst=following, group=self._control_group)
            dist.recv(theirs, src=previous, group=self._control_group)
            if sending is not None:
                sending.wait()
        return theirs

    def raise_together(self, error: Exception | None) -> None:
        """Return if no rank has an error; else raise the error of the lowest such rank on every rank.

        Rank 0 reports it, whichever rank has it: the launcher may show nothing of the other ranks.
        """
        # One number is exchanged in a fifth of the time of objects, and a load asks dozens of times.
        if self.max_over_ranks(error is not None)[0]:
            self._raise_first(self.gather_errors(error), error)

    def gather_errors(self, error: Exception | None) -> list[Exception | None]:
        """Return the error of each rank, by rank, on every rank; one that pickle cannot carry as a RuntimeError."""
        return [error] if self.world_size == 1 else self.gather(error and _picklable(error))

    def _raise_first(self, errors: Sequence[Exception | None], error: Exception | None) -> None:
        """Raise the first of `errors`, which are by rank; `error` is this rank's own."""
        for rank, found in enumerate(errors):
            if found is not None:
                own = error if rank == self.rank and error is not None else found
                if isinstance(own, TorchtitanLiteError):
                    own.origin_rank, own.reported_elsewhere = rank, not self.is_coordinator
                raise own


def _finish(sending: dist.Work) -> None:
    """Wait until `sending` is over. Raises PeerLost."""
    with naming_lost_peers():
        sending.wait()


def _attempted(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what `make` returns and no error, or nothing and what it raises."""
    try:
        return make(), None
    except Exception as error:
        return None, error


def _result(value: T | None, failure: Exception | None, own: Exception | None) -> T:
    """Return `value`, which the coordinator sent, or raise `failure`: as `own`, with its traceback, where it arose."""
    if failure is not None:
        raise own if own is not None else _mark_reported(failure)
    return cast(T, value)


def _picklable(error: Exception | None) -> Exception | None:
    # An error that cannot be pickled would leave the other ranks waiting; one that cannot be unpickled would be lost.
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _mark_reported(error: Exception) -> Exception:
    if isinstance(error, TorchtitanLiteError):
        error.reported_elsewhere = True
    return error
