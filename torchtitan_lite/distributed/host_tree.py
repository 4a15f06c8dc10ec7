"""Exchanges of all ranks with the coordinator, through one rank of each host: every message as long as it is.

torch's exchanges of objects pad every rank's to the longest: if one of 16,000 ranks sends a megabyte, the coordinator
receives 16 GB, and from each rank. Here the ranks of a host send to its lowest rank, and these send to rank 0; answers
come back the same way.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from typing import Generic, TypeVar, cast

import torch
import torch.distributed as dist

from torchtitan_lite.distributed.lost_peer import naming_lost_peers


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

T = TypeVar("T")
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
