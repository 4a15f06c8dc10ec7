"""Which host uploads which files: each those that its own ranks wrote, so that no host sends what another one has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_lite.store import layout


@dataclass(frozen=True)
class Share:
    """The files of one host."""

    host: int = 0
    """Its number. Host 0 is that of the coordinator, which commits, and has all files of no rank."""
    host_of_rank: tuple[int, ...] = ()

    @classmethod
    def of(cls, rank: int, hosts: Sequence[int]) -> Share:
        """Return the share of the host of `rank`, where the ranks are on `hosts`."""
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        return cls(numbers[hosts[rank]], tuple(numbers[host] for host in hosts))

    def has(self, name: str) -> bool:
        """Return whether the file `name` of a checkpoint is one of these."""
        return self.host == self.host_of(name)

    def host_of(self, name: str) -> int:
        """Return the number of the host that uploads the file `name`."""
        found = layout.parse_rank_file(name)
        rank = -1 if found is None else found[0]
        # A checkpoint of an earlier start may have more ranks.
        return self.host_of_rank[rank] if 0 <= rank < len(self.host_of_rank) else 0
