"""All ranks of the job, where one decides for all, or where the error of one must be raised on all.

These are the rare exchanges: which checkpoint to load, whether the plan of a save holds. They have gloo groups of their
own, which are created when they are first needed and have threads and sockets until `close`. Without a process group
everything works for the only process. All methods are **collective** unless they say otherwise, and raise PeerLost if
another rank has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.distributed.exchange import Exchange, failures_text, portable
from torchtitan_lite.distributed.groups import destroy, gloo_group, world_size
from torchtitan_lite.distributed.lost_peer import naming_lost_peers
from torchtitan_lite.errors import CheckpointError, CheckpointUnreadable, TorchtitanLiteError

T = TypeVar("T")
U = TypeVar("U")


class Peers:
    """All ranks of the job, for checkpoint code. `timeout` bounds each collective.

    It has two groups: that of `saves` is for the thread that saves; the collectives of the main thread go through the
    other one. `is_alone`: whether no other rank agrees on anything, although the default process group has more: those
    of a dry run do not exist.
    """

    def __init__(self, timeout: timedelta, *, is_alone: bool = False) -> None:
        self._timeout, self._is_alone = timeout, is_alone
        self._saves: Exchange | None = None
        self._control: Exchange | None = None
        self.is_group_in_doubt = False
        """Whether the group of `saves` failed on this rank, or a thread hangs in it. Callers set it; not collective."""

    @property
    def rank(self) -> int:
        """Return this rank; 0 without a process group. Not collective."""
        return dist.get_rank() if self.world_size > 1 else 0

    @property
    def world_size(self) -> int:
        """Return the number of ranks. Not collective."""
        return 1 if self._is_alone else world_size()

    @property
    def is_coordinator(self) -> bool:
        """Return whether this rank reads the folder and commits. Not collective."""
        return self.rank == 0

    @property
    def saves(self) -> Exchange:
        """Return the exchange of saves, whose group is created on the first access."""
        if self._saves is None or (self._saves.group is None and self.world_size > 1):
            self._saves = self._new_exchange()
        return self._saves

    def renew_group(self) -> None:
        """Replace the group of `saves`: a collective that failed or timed out may have left the old one unusable.

        The old group stays: a thread may still hang in it.
        """
        self.is_group_in_doubt = False
        self._saves = self._new_exchange()

    def close(self) -> None:
        """Destroy the groups; the next exchange creates others. Idempotent; waits for no rank.

        This rank may be in no exchange. A group in doubt stays: a thread may still hang in it.
        """
        for exchange in (self._control, None if self.is_group_in_doubt else self._saves):
            if exchange is not None:
                destroy(exchange.group)
        self._control = self._saves = None
        self.is_group_in_doubt = False

    @property
    def _main(self) -> Exchange:
        """Return the exchange of the main thread."""
        if self.world_size == 1:
            return Exchange(None)
        if self._control is None:
            self._control = self._new_exchange()
        return self._control

    def _new_exchange(self) -> Exchange:
        return Exchange(gloo_group(self._timeout) if self.world_size > 1 else None)

    def on_coordinator(self, choose: Callable[[], T]) -> T:
        """Call `choose` on the coordinator; return its result on every rank, or raise its error on every rank."""
        exchange = self._main  # First: a rank that waits for the creation of a group does not notice the end of a peer.
        chosen, own = _attempted(choose) if self.is_coordinator else (None, None)
        return _result(*exchange.from_coordinator((chosen, portable(own))), own)

    def gather(self, mine: T) -> list[T]:
        """Return each rank's `mine`, by rank, on every rank."""
        return self._main.gathered_by_all(mine)

    def together(self, make: Callable[[], T]) -> T:
        """Return the result of `make` on this rank. If it raised on any rank, raise as `raise_together`."""
        made, error = _attempted(make)
        self.raise_together(error)
        return cast(T, made)

    def max_over_ranks(self, *mine: int) -> tuple[int, ...]:
        """Return the maximum over all ranks of each number, on every rank."""
        if self.world_size == 1:
            return mine
        values = torch.tensor(mine, dtype=torch.int64, device="cpu")
        with naming_lost_peers():
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._main.group)
        return tuple(values.tolist())

    def gather_number(self, mine: int) -> list[int]:
        """Return each rank's `mine`, of 63 bits, by rank, on every rank."""
        return self._main.gathered_numbers(mine)

    def on_all_ranks(self, mine: Collection[str], known: Sequence[str]) -> list[str]:
        """Return those of the names `known`, the same on each rank, that every rank has in `mine`. No name travels."""
        if self.world_size == 1:
            return [name for name in known if name in mine]
        has = torch.tensor([name in mine for name in known], dtype=torch.uint8, device="cpu")
        with naming_lost_peers():
            dist.all_reduce(has, op=dist.ReduceOp.MIN, group=self._main.group)
        return [known[at] for at in has.nonzero().flatten().tolist()]

    def scatter_answers(self, mine: T, answer: Callable[[list[T]], list[U]]) -> U:
        """Send each rank's `mine` to the coordinator; return this rank's part of what `answer` returns there.

        `answer` gets and returns lists by rank. What it raises is raised on every rank.
        """
        if self.world_size == 1:
            return answer([mine])[0]
        gathered = self._main.gathered(mine)
        outcomes: list[tuple[U | None, Exception | None]] | None = None
        own: Exception | None = None
        if gathered is not None:
            answers, own = _attempted(lambda: answer(gathered))
            by_rank: Sequence[U | None] = answers if answers is not None else [None] * self.world_size
            failure = portable(own)
            outcomes = [(given, failure) for given in by_rank]
        return _result(*self._main.scattered(outcomes), own)

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
                dist.recv(message, src=previous, group=self._main.group)
            if following is not None:
                sending = dist.isend(message, dst=following, group=self._main.group)
        return bool if sending is None else partial(_finish, sending)

    def raise_together(self, error: Exception | None) -> None:
        """Return if no rank has an error; else raise the error of the lowest such rank on every rank.

        Rank 0 reports it, whichever rank has it: the launcher may show nothing of the other ranks.
        """
        for rank, found in self.failures(error).items():
            if isinstance(found, TorchtitanLiteError):
                found.origin_rank, found.reported_elsewhere = rank, not self.is_coordinator
            raise found

    def failures(self, error: Exception | None) -> dict[int, Exception]:
        """Return the errors of ranks, by rank, on every rank: this one's own with its traceback."""
        # One number is exchanged in a fifth of the time of objects, and a load asks dozens of times.
        if not self.max_over_ranks(error is not None)[0]:
            return {}
        found = {rank: each for rank, each in enumerate(self.gather(portable(error))) if each is not None}
        return found if error is None else found | {self.rank: error}


def build_peers(config: JobConfig, *, simulated: bool) -> Peers:
    """Return how the ranks of this job agree, within `checkpoint.timeout_seconds`."""
    timeout = timedelta(seconds=config.checkpoint.timeout_seconds)
    return Peers(timeout, is_alone=simulated)


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
    if own is not None:
        raise own
    if isinstance(failure, TorchtitanLiteError):
        failure.reported_elsewhere = True
    if failure is not None:
        raise failure
    return cast(T, value)


def together_or_worst(make: Callable[[], T], peers: Peers, path: str) -> T:
    """Return the result of `make` on this rank. **Collective**, by one number if all goes well.

    Raises the worst failure of any rank, on every rank: `CheckpointUnreadable` for an I/O error, because nothing else
    is proven then; else the error of the lowest rank. Any error that is not of this package counts as an I/O error. An
    interrupt, too, is a failure of the rank, except where there are no others.
    """
    made: T | None = None
    failure: Exception | None = None
    try:
        made = make()
    except Exception as error:
        failure = error
    except BaseException as error:
        if peers.world_size == 1:
            raise
        failure = RuntimeError(f"{type(error).__name__}: {error}")
    if failures := peers.failures(failure):
        worst = _worst(failures, path)
        raise worst from (None if worst is failure else failure)
    return cast(T, made)


def _worst(failures: Mapping[int, BaseException], path: str) -> CheckpointError:
    """Return the one of the ranks' errors to raise on all of them."""
    found = [cause for cause in failures.values() if isinstance(cause, CheckpointError)]
    if len(found) < len(failures):
        return CheckpointUnreadable(path, failures_text(failures))
    # Damage on one rank and an I/O error on another may be symptoms of the same failure.
    return next((cause for cause in found if isinstance(cause, CheckpointUnreadable)), found[0])
