"""Shuffle without a list.

For every size, seed and epoch, `shuffled` is a bijection of range(size) that needs no memory and no history: a Feistel
network over the next power of four, applied until the result is inside the range (Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002). Its values must never change: a checkpoint does not hold the order, so a resumed run
computes it again.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

_ROUNDS = 6
_MASK = (1 << 64) - 1


def shuffled(position: int, *, size: int, seed: int, epoch: int) -> int:
    """Return the element at `position` of the epoch's order; both are in range(size)."""
    assert 0 <= position < size, f"{position} is not in range({size})"
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    # Fewer than four steps on average: the network's domain is less than four times the range.
    while (position := _feistel(position, half_bits, keys)) >= size:
        pass
    return position


def _feistel(value: int, half_bits: int, keys: tuple[int, ...]) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(key ^ right) & mask)
    return left << half_bits | right


def _mix(value: int) -> int:
    """Return splitmix64's finaliser of `value`: each bit of the result depends on each bit of `value`."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS))
