"""Verifies that the loaded tensors equal the saved ones.

The manifest holds a digest of every logical tensor that is the same for every topology. After a load
each rank digests its own shards, the digests are summed over the ranks, each shard once, and the sums
must equal the manifest's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.format.flattening import flat_tensors
from torchtitan_lite.checkpoint.format.shards import Shape, parts_of
from torchtitan_lite.checkpoint.format.tensor_digest import TensorDigest, digest_chunk, finish
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointMismatch
from torchtitan_lite.log import counted, logger


def verify(path: str, make_state: Callable[[], dict[str, Any]], expected: Mapping[str, str], peers: Peers) -> None:
    """Raise `CheckpointMismatch` for the first tensor of `make_state()` whose digest is not the `expected` one.

    `expected` has the manifest's digests by key; a key that is in only one of the two is skipped. What fails on one
    rank is raised on every rank. **Collective**.
    """
    if not expected:
        logger.warning("%s has no tensor digests: nothing to verify. Save with --checkpoint.digest_tensors=save", path)
        return
    per_rank = peers.gather_made(lambda: _shares(make_state(), expected))
    found = _add_up([own for own, _ in per_rank])
    dtypes_and_shapes = {key: value for _, described in per_rank for key, value in described.items()}
    for key, digest in sorted(found.items()):
        if digest is None or finish(digest, *dtypes_and_shapes[key]).to_hex() != expected[key]:
            raise CheckpointMismatch(path, f"  {key} is not, after loading, what was saved")
    if not found:
        logger.warning("No tensor of %s has the name that it was saved under: nothing was verified", path)
        return
    logger.info(
        "Verified %s: %s what was saved", counted(len(found), "tensor"), "it is" if len(found) == 1 else "they are"
    )


def _shares(
    state: dict[str, Any], expected: Mapping[str, str]
) -> tuple[dict[str, dict[Shape, TensorDigest]], dict[str, tuple[torch.dtype, Shape]]]:
    """Return this rank's part of each tensor's sum, and each tensor's dtype and shape."""
    tensors = flat_tensors(state)
    own = {key: _own(key, tensor) for key, tensor in tensors.items() if key in expected}
    return own, {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}


def _own(key: str, tensor: torch.Tensor) -> dict[Shape, TensorDigest]:
    """Return the digest of each part of `tensor` on this rank, by the part's offsets."""
    if isinstance(tensor, DTensor) and _is_counted_elsewhere(tensor):
        return {}
    return {
        tuple(part.offsets): digest_chunk(part.memory.cpu(), global_shape=tensor.shape, offsets=part.offsets)
        for part in parts_of(key, tensor)
    }


def _is_counted_elsewhere(tensor: DTensor) -> bool:
    """Return whether another rank of the tensor's mesh counts the part that this one has."""
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and any(
        place.is_replicate() and coordinate[dim] != 0 for dim, place in enumerate(tensor.placements)
    )


def _add_up(per_rank: list[dict[str, dict[Shape, TensorDigest]]]) -> dict[str, TensorDigest | None]:
    """Return the sum over the parts of each tensor; None where two ranks hold different values of one part.

    Ranks of different meshes may hold the same parts: under FSDP2 with tensor parallelism, a layer that the latter does
    not shard is sharded by FSDP2 once for each tensor-parallel rank.
    """
    parts: dict[str, dict[Shape, TensorDigest]] = {}
    differing: set[str] = set()
    for own in per_rank:
        for key, shares in own.items():
            known = parts.setdefault(key, {})
            for offsets, digest in shares.items():
                if known.setdefault(offsets, digest) != digest:
                    differing.add(key)
    return {key: None if key in differing else sum(known.values(), TensorDigest.zero()) for key, known in parts.items()}
