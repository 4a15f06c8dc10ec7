"""Optimizer states that only some of the ranks with their parameter keep, as the momenta of distributed Muons.

A plan finds them by their absence on the other ranks, and a checkpoint has, under `owners.<fqn>.<key>`, which ranks of
how many had the state. As many ranks load it as they had it, and one rank loads all; for another number of ranks, only
the user's `StateOwner` can say which of them has it now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan_lite.errors import ConfigError

StateOwner = Callable[[str, int], int | None]
"""From the name of a parameter and the number of ranks to the rank that alone has its state; None: each rank has it."""
OWNERS = "owners"
OWNER_KEYS = f"optimizer.{OWNERS}."


@dataclass(frozen=True)
class OwnerRanks:
    """The `ranks`, of `num_ranks`, that had a state when it was saved."""

    ranks: tuple[int, ...]
    num_ranks: int
    sharding: str = ""
    """How the parameter was sharded, if each of the ranks had a shard of the state; empty if it had all."""

    def __str__(self) -> str:
        return f"{','.join(map(str, self.ranks))} of {self.num_ranks}" + (self.sharding and f" as {self.sharding}")

    @classmethod
    def parse(cls, text: object) -> OwnerRanks:
        """Return what `text` of a checkpoint says; no ranks of none for anything else."""
        whole, _, sharding = str(text).partition(" as ")
        ranks, _, num_ranks = whole.partition(" of ")
        numbers = [*ranks.split(","), num_ranks]
        if not all(number.isascii() and number.isdecimal() for number in numbers):
            return cls((), 0)
        return cls(tuple(map(int, numbers[:-1])), int(num_ranks), sharding)

    def are_known(self, num_ranks: int, owner: int | None, sharding: str) -> bool:
        """Return whether it is known which of `num_ranks` have the state now.

        `owner` as `StateOwner` gives it; `sharding` is that of the parameter now.
        """
        if num_ranks == self.num_ranks:
            return self.sharding in ("", sharding)
        return num_ranks == 1 or (owner is not None and not self.sharding)

    def include(self, rank: int, num_ranks: int, owner: int | None) -> bool:
        """Return whether `rank` of `num_ranks` has the state now, if that is known."""
        if num_ranks == self.num_ranks:
            return rank in self.ranks
        return num_ranks == 1 or rank == owner


def owner_of(state_owner: StateOwner | None, name: str, num_ranks: int) -> int | None:
    """Return the rank that alone has the state of the parameter `name`. Raises ConfigError for anything but a rank."""
    owner = state_owner(name, num_ranks) if state_owner is not None else None
    if owner is not None and (type(owner) is not int or not 0 <= owner < num_ranks):
        raise ConfigError(
            f"state_owner({name!r}, {num_ranks}) returned {owner!r}. Expected the number of a rank, below {num_ranks}, "
            "or None where each rank keeps the state."
        )
    return owner
