"""Initial parameters that do not depend on how they are sharded.

The value of an element depends only on the seed, the parameter's FQN and the element's index in the whole parameter:
not on a generator state, a rank or a device. So one process and every mesh, uneven shards included, hold the same model
bit for bit, and each rank computes only its own shard, without communication.

An element's hash is splitmix64 (Steele, Lea, Flood 2014) in wrapping 64-bit integers. The sum of the twelve 16-bit
fields of three hashes is close to normal (Irwin-Hall: mean and variance exact, support +-6 std) and exact in integers;
one float32 multiplication follows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.format.shards import part_of
from torchtitan_lite.torch_private import WRAPPED_FOR_RECOMPUTING

_CHUNK = 1 << 20  # elements at a time; about 40 MiB of int64 temporaries
_FIELD_MEAN = 12 * 65535 // 2
_FIELD_STD = 65536.0  # of the sum: sqrt(65536**2 - 1)
_GOLDEN = 0x9E3779B97F4A7C15
_LOW_FIELDS = 0x0000FFFF0000FFFF


@dataclass(frozen=True)
class Normal:
    """A normal distribution. Values are clamped to `cutoff` standard deviations from the mean; None: not clamped."""

    std: float
    mean: float = 0.0
    cutoff: float | None = None


@torch.no_grad()
def init_parameters(model: nn.Module, seed: int, distribution: Callable[[str], Normal]) -> None:
    """Fill every parameter with the values of `seed`, from `distribution(fqn)`. **Any rank**, no communication."""
    for name, parameter in model.named_parameters():
        fqn = name.replace(WRAPPED_FOR_RECOMPUTING, "")
        digest = hashlib.blake2b(f"{seed}:{fqn}".encode(), digest_size=8).digest()
        _fill(fqn, parameter, int.from_bytes(digest, "little"), distribution(fqn))


def _fill(fqn: str, parameter: Tensor, key: int, normal: Normal) -> None:
    local, offset = _local_shard(fqn, parameter)
    flat = local.view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        index = torch.arange(start, start + chunk.numel(), device=flat.device)
        # Not `torch.normal_`: torch's generators do not promise the same numbers on all devices and shardings.
        values = _standard_normal(_global_index(index, local.shape, offset, parameter.shape), key) * normal.std
        if normal.cutoff is not None:
            values.clamp_(-normal.cutoff * normal.std, normal.cutoff * normal.std)
        chunk.copy_(values + normal.mean)


def _local_shard(fqn: str, parameter: Tensor) -> tuple[Tensor, Sequence[int]]:
    """Return this rank's shard of `parameter`, and the offsets of the shard in the whole."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), (0,) * parameter.dim()
    part = part_of(fqn, parameter)
    return part.memory, part.offsets


def _global_index(index: Tensor, local: Sequence[int], offset: Sequence[int], whole: Sequence[int]) -> Tensor:
    """Return the linear indices in the whole parameter for linear indices in a shard."""
    result = torch.zeros_like(index)
    for dim in reversed(range(len(whole))):
        result += (index % local[dim] + offset[dim]) * math.prod(whole[dim + 1 :])
        index = index // local[dim]
    return result


def _standard_normal(index: Tensor, key: int) -> Tensor:
    # Sums two 16-bit fields at once, one in each 32-bit half, so that six additions become three.
    fields = torch.zeros_like(index)
    for draw in range(3):
        bits = _splitmix64(index * _signed(3 * _GOLDEN) + _signed(key + (draw + 1) * _GOLDEN))
        fields += (bits & _LOW_FIELDS) + ((bits >> 16) & _LOW_FIELDS)
    total = (fields & 0xFFFFFFFF) + (fields >> 32)
    return (total - _FIELD_MEAN).float() / _FIELD_STD


def _splitmix64(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, by: int) -> Tensor:
    # int64 has only the arithmetic shift; the mask clears the copies of the sign.
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    """Return the int64 with the low 64 bits of `value`."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
