"""Checkpoints to convert, with what must come out: ours of several ranks, plain DCP's, torchtitan's."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import torch

from tests.checkpoint.reading.boxes import Box
from tests.checkpoint.reading.stored_boxes import numbers, write
from tests.checkpoint.with_manifest import add_manifest
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import CheckpointKind


def weights() -> dict[str, torch.Tensor]:
    """Return tensors of several dtypes and shapes, one of several blocks, one empty and one scalar."""
    return {
        "tok.weight": numbers((700, 512), torch.float32, 1),
        "layers.0.weight": numbers((64, 48), torch.bfloat16, 2),
        "layers.0.bias": numbers((48,), torch.float64, 3),
        "layers.1.mask": numbers((5,), torch.bool, 4),
        "layers.1.count": numbers((3, 2), torch.int64, 5),
        "layers.1.empty": torch.zeros(0, 3),
        "scale": torch.tensor(2.5),
    }


def by_columns(tensor: torch.Tensor, count: int) -> list[Box]:
    """Return the boxes of `tensor`, cut into `count` parts along its last dimension."""
    if not tensor.dim() or not tensor.numel():
        return [((0,) * tensor.dim(), tuple(tensor.shape))]
    cuts = [tensor.shape[-1] * at // count for at in range(count + 1)]
    lead = tuple(tensor.shape[:-1])
    return [((*(0,) * len(lead), begin), (*lead, end - begin)) for begin, end in pairwise(cuts) if end > begin]


def sharded_weights(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write `weights` in four columns each, with a manifest; return the folder and the tensors."""
    tensors = weights()
    write(folder, tensors, {key: by_columns(tensor, 4) for key, tensor in tensors.items()})
    manifest = dataclasses.replace(add_manifest(folder), kind=CheckpointKind.WEIGHTS_ONLY)
    (folder / layout.MANIFEST).write_bytes(manifest.to_json())
    return folder, tensors
