"""Objects of all ranks, on their way to the coordinator and back, through one group."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Generic, TypeVar, cast

import torch
import torch.distributed as dist
import xxhash

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


# Exchanges of all ranks with the coordinator, through one rank of each host: every message as long as it is.
#
# torch's exchanges of objects pad every rank's to the longest: if one of 16,000 ranks sends a megabyte, the coordinator
# receives 16 GB, and from each rank. Here the ranks of a host send to its lowest rank, and these send to rank 0;
# answers come back the same way.


class HostTree:
    """The ranks of `group`, all ranks, whose hosts have the numbers `hosts`. All methods are **collective**."""

    def __init__(self, hosts: Sequence[int], group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank()
        by_host: dict[int, list[int]] = {}
        for rank, host in enumerate(hosts):
            by_host.setdefault(host, []).append(rank)
        self._hosts = list(by_host.values())
        """The ranks of each host; the first one of the first host is the coordinator."""
        self._own = by_host[hosts[self._rank]]

    def to_coordinator(self, mine: bytes) -> list[bytes] | None:
        """Return what each rank gave, by rank, on the coordinator; None on the others."""
        first = self._own[0]
        if self._rank != first:
            self._send(mine, first)
            return None
        of_host = [mine, *self._received(self._own[1:])]
        if first != 0:
            self._send(pickle.dumps(of_host), 0)
            return None
        of_hosts = [of_host, *map(pickle.loads, self._received([ranks[0] for ranks in self._hosts[1:]]))]
        found = [b""] * sum(map(len, self._hosts))
        for ranks, parts in zip(self._hosts, of_hosts, strict=True):
            for rank, part in zip(ranks, parts, strict=True):
                found[rank] = part
        return found

    def from_coordinator(self, parts: Sequence[bytes] | None) -> bytes:
        """Return this rank's part of what the coordinator gives, by rank."""
        first = self._own[0]
        if self._rank != first:
            return self._received([first])[0]
        if parts is None:
            of_host: list[bytes] = pickle.loads(self._received([0])[0])
        else:
            for ranks in self._hosts[1:]:
                self._send(pickle.dumps([parts[rank] for rank in ranks]), ranks[0])
            of_host = [parts[rank] for rank in self._own]
        for rank, part in zip(self._own[1:], of_host[1:], strict=True):
            self._send(part, rank)
        return of_host[0]

    def from_coordinator_to_all(self, data: bytes | None) -> bytes:
        """Return what the coordinator gives to all."""
        size = torch.tensor([len(data or b"")], device="cpu")
        with naming_lost_peers():
            dist.broadcast(size, src=0, group=self._group)
            message = (
                _bytes_tensor(data) if data is not None else torch.empty(int(size), dtype=torch.uint8, device="cpu")
            )
            dist.broadcast(message, src=0, group=self._group)
        return message.numpy().tobytes()

    def _send(self, data: bytes, rank: int) -> None:
        with naming_lost_peers():
            dist.send(torch.tensor([len(data)], device="cpu"), dst=rank, group=self._group)
            dist.send(_bytes_tensor(data), dst=rank, group=self._group)

    def _received(self, ranks: Sequence[int]) -> list[bytes]:
        """Return what each of `ranks` sends; they send at the same time."""
        sizes = torch.empty(len(ranks), 1, dtype=torch.int64, device="cpu")
        with naming_lost_peers():
            _wait_for_works(
                [dist.irecv(size, src=rank, group=self._group) for size, rank in zip(sizes, ranks, strict=True)]
            )
            messages = [torch.empty(int(size), dtype=torch.uint8, device="cpu") for size in sizes]
            _wait_for_works(
                [dist.irecv(each, src=rank, group=self._group) for each, rank in zip(messages, ranks, strict=True)]
            )
        return [message.numpy().tobytes() for message in messages]


def _wait_for_works(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


SMALL_BYTES = 512
"""Up to this length an object stays in the exchange."""
_numbers = itertools.count(1)

Sent = bytes | tuple[int, int]
"""What goes through the exchange: the object as pickle has it, or its bytes and the number under which they follow."""


class SentApart(Generic[T]):
    """An object of each rank of `group`, all ranks, on its way to rank 0; None: of the only process.

    It must live until the exchange is over on rank 0.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._own: T | None = None
        self._sending: tuple[torch.Tensor, dist.Work | None] | None = None

    def send(self, mine: T) -> Sent:
        """Send `mine`; return what goes through the exchange. Any rank, once; waits for no other."""
        if self._group is None or dist.get_rank() == 0:
            self._own = mine
            return b""
        data = pickle.dumps(mine)
        if len(data) <= SMALL_BYTES:
            return data
        message, number = torch.frombuffer(bytearray(data), dtype=torch.uint8), next(_numbers)
        with naming_lost_peers():
            self._sending = message, dist.isend(message, dst=0, group=self._group, tag=number)
        return len(data), number

    def received(self, rank: int, sent: Sent) -> T:
        """Return what `rank` gave, of which `sent` went through the exchange. Coordinator only; raises PeerLost."""
        if rank == 0:
            return cast(T, self._own)
        if isinstance(sent, bytes):
            return cast(T, pickle.loads(sent))
        num_bytes, number = sent
        message = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        with naming_lost_peers():
            dist.recv(message, src=rank, group=self._group, tag=number)
        return cast(T, pickle.loads(message.numpy().tobytes()))
