"""Objects that go to the coordinator alongside an exchange of all ranks, each as long as it is.

DCP's exchange of results pads each rank's to the longest: the settings of a large optimizer, megabytes that one rank
has, would come from every rank. So what is not small is sent from rank to rank, under a number of its own: if the
exchange fails before the coordinator takes it, no later one takes it for its own.
"""

from __future__ import annotations

import itertools
import pickle
from typing import Generic, TypeVar, cast

import torch
import torch.distributed as dist

from torchtitan_lite.distributed.lost_peer import naming_lost_peers

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
