"""The contents of a checkpoint in terms of torch: its dtypes, and DCP's metadata."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan_lite.checkpoint.format import dtypes
from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.torch_private import storage_info

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in dtypes.DTYPES if hasattr(torch, name)}
"""Those of `dtypes.DTYPES` that this version of torch has, by name. Contents made with them have torch's dtypes."""


def to_metadata(contents: Contents) -> Metadata:
    """Return `contents`, made with `DTYPES`, as DCP's metadata."""
    described: dict[str, Any] = {key: BytesStorageMetadata() for key in contents.objects}
    where: dict[MetadataIndex, Any] = {}
    of_item = storage_info()
    for key, stored in contents.objects.items():
        where[MetadataIndex(key)] = of_item(*(stored.item or ("", 0, 0)))
    for key, tensor in contents.tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
        described[key] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks)
        for index, chunk in enumerate(tensor.chunks):
            where[MetadataIndex(key, chunk.offsets, index)] = of_item(*chunk.place(tensor.dtype.itemsize))
    return Metadata(described, planner_data=dict(contents.paths), storage_data=where, storage_meta=StorageMeta())
