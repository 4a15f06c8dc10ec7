"""Which rank keeps the replicas of which: the hosts form a ring, and each rank sends to one of the next host."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_SIOCGIFADDR = 0x8915
_IFNAMSIZ = 16
_ANY_PORT = 9
_MOST_NAMED = 8


@dataclass(frozen=True)
class ReplicaHost:
    """Where a rank receives replicas."""

    host: str
    """The same for all ranks that share the memory of a host."""
    name: str
    """The host's, for people."""
    address: str
    """By which other hosts reach it; empty if this is not known."""
    port: int
    secret: bytes = b""
    """Of this start of the job; the coordinator's counts."""


def partners(hosts: Sequence[str]) -> list[int]:
    """Return, by rank, the rank that keeps its replicas, given the host of each rank: never one of the same host.

    The hosts are in the order of their first ranks; empty if there is only one.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    if len(by_host) < 2:
        return []
    ring = [*by_host.values()]
    to = {
        rank: following[number % len(following)]
        for own, following in zip(ring, [*ring[1:], ring[0]], strict=True)
        for number, rank in enumerate(own)
    }
    return [to[rank] for rank in range(len(hosts))]


def in_words(places: Sequence[ReplicaHost]) -> str:
    """Return the ring as people read it: host-1 -> host-2 -> host-1."""
    names = [*{place.host: place.name for place in places}.values()]
    shown = names if len(names) <= _MOST_NAMED else [*names[: _MOST_NAMED - 1], f"{len(names) - _MOST_NAMED + 1} more"]
    return " -> ".join([*shown, names[0]])


def own_address(interface: str, master: str) -> str:
    """Return the address of the network `interface`, or of the one that leads to `master`; empty if there is none.

    An address of the loopback is none that another host could reach.
    """
    try:
        found = _address_of(interface) if interface else _address_towards(master)
    except OSError:
        return ""
    return "" if ipaddress.ip_address(found.partition("%")[0]).is_loopback else found


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[: _IFNAMSIZ - 1])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])


def _address_towards(master: str) -> str:
    family, kind, _, _, address = socket.getaddrinfo(master, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # Sends nothing, but chooses a route.
        return str(probe.getsockname()[0])
