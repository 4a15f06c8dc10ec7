"""Objects of all ranks, on their way to the coordinator and back, through one group.

torch's exchanges of objects pad every rank's to the longest: if one of 16,000 ranks sends a megabyte, the coordinator
receives 16 GB, and from each rank. Here the ranks of a host send to its lowest rank, and these send to rank 0; answers
come back the same way, and every message is as long as it is.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from traceback import clear_frames
from typing import TypeVar, cast

import torch
import torch.distributed as dist
import xxhash

from torchtitan_lite.distributed.groups import destroy
from torchtitan_lite.distributed.lost_peer import naming_lost_peers
from torchtitan_lite.errors import SaveFailed
from torchtitan_lite.host_memory import host_id
from torchtitan_lite.log import counted

T = TypeVar("T")
U = TypeVar("U")
E = TypeVar("E", bound=BaseException)


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

    def leave(self, error: BaseException | None) -> None:
        """Close the connections, after `error`: ranks that wait for this one raise PeerLost. Not collective."""
        destroy(self.group)
        self.group = None
        while error is not None:
            clear_frames(error.__traceback__)  # They refer to the group, which lives as long.
            error = error.__cause__

    def gathered(self, mine: T) -> list[T] | None:
        """Return each rank's `mine`, by rank, on the coordinator; None on the others."""
        if self.size == 1:
            return [mine]
        parts = self._to_coordinator(pickle.dumps(mine))
        return None if parts is None else [pickle.loads(part) for part in parts]

    def gathered_by_all(self, mine: T) -> list[T]:
        """Return each rank's `mine`, by rank, on every rank."""
        if self.size == 1:
            return [mine]
        return [pickle.loads(part) for part in self.from_coordinator(self._to_coordinator(pickle.dumps(mine)))]

    def scattered(self, by_rank: list[T] | None) -> T:
        """Return this rank's one of what the coordinator gives, by rank."""
        if self.size == 1:
            return cast("list[T]", by_rank)[0]
        first = self._of_host[0]
        if self.rank != first:
            return cast(T, pickle.loads(self._received([first])[0]))
        if by_rank is None:
            of_host: list[bytes] = pickle.loads(self._received([0])[0])
        else:
            parts = [pickle.dumps(each) for each in by_rank]
            for ranks in self._hosts[1:]:
                self._send(pickle.dumps([parts[rank] for rank in ranks]), ranks[0])
            of_host = [parts[rank] for rank in self._of_host]
        for rank, part in zip(self._of_host[1:], of_host[1:], strict=True):
            self._send(part, rank)
        return cast(T, pickle.loads(of_host[0]))

    def from_coordinator(self, value: T | None) -> T:
        """Return what the coordinator gives."""
        if self.size == 1:
            return cast(T, value)
        # Not broadcast_object_list, which takes twice as long.
        data = pickle.dumps(value) if self.rank == 0 else b""
        size = torch.tensor([len(data)], device="cpu")
        with naming_lost_peers():
            dist.broadcast(size, src=0, group=self.group)
            message = _bytes_tensor(data) if data else torch.empty(int(size), dtype=torch.uint8, device="cpu")
            dist.broadcast(message, src=0, group=self.group)
        return cast(T, value if data else pickle.loads(message.numpy().tobytes()))

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
                    failures = {0: portable(error) or error}
            outcome = chosen, failures
        chosen, failures = self.from_coordinator(outcome)
        if failures:
            if self.rank in failures and own is not None:
                failures[self.rank] = own  # With its traceback.
            raise RanksFailed(failures)
        return cast(U, chosen)

    def gathered_numbers(self, mine: int) -> list[int]:
        """Return each rank's `mine`, of 63 bits, by rank, on every rank."""
        if self.size == 1:
            return [mine]
        own = torch.tensor([mine], dtype=torch.int64, device="cpu")
        numbers = [torch.zeros_like(own) for _ in range(self.size)]
        with naming_lost_peers():
            dist.all_gather(numbers, own, group=self.group)
        return [int(number) for number in numbers]

    @cached_property
    def _hosts(self) -> list[list[int]]:
        """The ranks of each host; the first one of the first host is the coordinator."""
        by_host: dict[int, list[int]] = {}
        for rank, host in enumerate(self.gathered_numbers(xxhash.xxh3_64_intdigest(host_id().encode()) >> 1)):
            by_host.setdefault(host, []).append(rank)
        return [*by_host.values()]

    @cached_property
    def _of_host(self) -> list[int]:
        return next(ranks for ranks in self._hosts if self.rank in ranks)

    def _to_coordinator(self, mine: bytes) -> list[bytes] | None:
        """Return what each rank gave, by rank, on the coordinator; None on the others."""
        first = self._of_host[0]
        if self.rank != first:
            self._send(mine, first)
            return None
        of_host = [mine, *self._received(self._of_host[1:])]
        if first != 0:
            self._send(pickle.dumps(of_host), 0)
            return None
        of_hosts = [of_host, *map(pickle.loads, self._received([ranks[0] for ranks in self._hosts[1:]]))]
        found = [b""] * self.size
        for ranks, parts in zip(self._hosts, of_hosts, strict=True):
            for rank, part in zip(ranks, parts, strict=True):
                found[rank] = part
        return found

    def _send(self, data: bytes, rank: int) -> None:
        with naming_lost_peers():
            dist.send(torch.tensor([len(data)], device="cpu"), dst=rank, group=self.group)
            dist.send(_bytes_tensor(data), dst=rank, group=self.group)

    def _received(self, ranks: Sequence[int]) -> list[bytes]:
        """Return what each of `ranks` sends; they send at the same time."""
        sizes = torch.empty(len(ranks), 1, dtype=torch.int64, device="cpu")
        self._receive(sizes, ranks)
        messages = [torch.empty(int(size), dtype=torch.uint8, device="cpu") for size in sizes]
        self._receive(messages, ranks)
        return [message.numpy().tobytes() for message in messages]

    def _receive(self, messages: Iterable[torch.Tensor], ranks: Sequence[int]) -> None:
        with naming_lost_peers():
            works = [dist.irecv(each, src=rank, group=self.group) for each, rank in zip(messages, ranks, strict=True)]
            for work in works:
                if work is not None:
                    work.wait()


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def portable(error: E | None) -> E | RuntimeError | None:
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
    # Of a failed save only why, because the error that it goes into says the rest.
    causes = [
        f"rank {rank}: {cause.cause if isinstance(cause, SaveFailed) else f'{type(cause).__name__}: {cause}'}"
        for rank, cause in sorted(failures.items())
    ]
    return "; ".join(causes[:3]) + (f"; and {counted(len(causes) - 3, 'more rank')}" if len(causes) > 3 else "")
