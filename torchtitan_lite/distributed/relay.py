"""Bytes that ranks pass around a ring: each message comes from one of them, and goes from neighbour to neighbour.

So each link carries a message once, and the last rank has it as soon as the pipeline is full. All ranks pass the same
messages in the same order; then a message is behind those before it only, and no rank waits in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchtitan_lite.distributed.peers import Peers


class Relay:
    """The ring of the ranks `members`, this one among them. Its methods are **collective** for them."""

    def __init__(self, peers: Peers, members: Sequence[int]) -> None:
        self._peers = peers
        self.size = len(members)
        self._members = members
        self.position = members.index(peers.rank)
        self._previous = members[self.position - 1]
        self._following = members[(self.position + 1) % self.size]

    def pass_on(self, owner: int, message: torch.Tensor) -> Callable[[], object]:
        """Fill `message` with that of the rank at position `owner`, and begin to send it on.

        Returns what waits until it was sent; before that it must not change. Raises `PeerLost`.
        """
        previous = None if owner == self.position else self._previous
        following = None if (self.position + 1) % self.size == owner else self._following
        return self._peers.relay(message, previous, following)

    def any(self, mine: bool) -> bool:
        """Return whether `mine` is true on any member.

        Each sends what it knows to the one that is 1, 2, 4, ... places on.
        """
        is_any, distance = torch.tensor([mine], device="cpu"), 1
        while distance < self.size:
            following = self._members[(self.position + distance) % self.size]
            previous = self._members[(self.position - distance) % self.size]
            is_any |= self._peers.swap(is_any.clone(), previous, following)
            distance *= 2
        return bool(is_any)
