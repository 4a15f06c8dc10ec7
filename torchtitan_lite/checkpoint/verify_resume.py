"""Proof that what was loaded is what was saved.

The manifest holds a digest of every logical tensor that is the same for every topology; after a load
each rank digests its own shards, the ranks add up, and the sums must be the manifest's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.shards import parts_of
from torchtitan_lite.checkpoint.tensor_digest import Digest, digest_chunk, finish
from torchtitan_lite.distributed.consensus import Peers
from torchtitan_lite.errors import CheckpointMismatch
from torchtitan_lite.log import logger


def verify(path: str, state: dict[str, Any], expected: Mapping[str, str], peers: Peers) -> None:
    """Raise `CheckpointMismatch` on every rank, naming the first tensor of `state` that is not as `expected`.

    `expected` is the manifest's digests by key; what is in only one of the two is skipped. What fails on one rank is
    raised on every rank. **Collective**.
    """
    if not expected:
        logger.warning("%s has no tensor digests: nothing to verify. Save with --checkpoint.tensor_digests.", path)
        return
    tensors = {key: t for key, t in flatten_state_dict(state)[0].items() if isinstance(t, torch.Tensor)}
    own: dict[str, tuple[Digest, bool]] = {}
    error: Exception | None = None
    try:
        own = {key: _own(key, tensor) for key, tensor in tensors.items() if key in expected}
    except Exception as raised:
        error = raised
    peers.raise_together(error)
    found = _add_up(peers.gather(own))
    described = peers.gather({key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()})
    dtypes_and_shapes = {key: value for per_rank in described for key, value in per_rank.items()}
    for key, digest in sorted(found.items()):
        if finish(digest, *dtypes_and_shapes[key]).to_hex() != expected[key]:
            raise CheckpointMismatch(path, f"  {key} is not, after loading, what was saved")
    if not found:
        logger.warning("None of the tensors of %s has the name that it was saved under: nothing was verified.", path)
        return
    logger.info("Verified %d tensors: they are what was saved.", len(found))


def _own(key: str, tensor: torch.Tensor) -> tuple[Digest, bool]:
    """This rank's share of the sum, and whether every rank that has the tensor has all of it."""
    total = Digest.zero()
    if not isinstance(tensor, DTensor):
        return digest_chunk(tensor.detach().cpu(), global_shape=tensor.shape, offsets=[0] * tensor.dim()), True
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return total, False
    replicas = [place for dim, place in enumerate(tensor.placements) if place.is_replicate() and coordinate[dim] != 0]
    if replicas:
        return total, False  # Another rank counts this shard.
    for part in parts_of(key, tensor):
        total += digest_chunk(part.memory.cpu(), global_shape=tensor.shape, offsets=part.offsets)
    return total, False


def _add_up(per_rank: list[dict[str, tuple[Digest, bool]]]) -> dict[str, Digest]:
    total: dict[str, Digest] = {}
    for shares in per_rank:
        for key, (digest, is_whole) in shares.items():
            if not is_whole:
                total[key] = total.get(key, Digest.zero()) + digest
            else:
                total.setdefault(key, digest)
    return total
