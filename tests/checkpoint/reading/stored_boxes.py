"""Checkpoints whose tensors are stored in boxes, written by DCP's own writer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from tests.checkpoint.reading.boxes import Box


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def write(folder: Path, tensors: dict[str, torch.Tensor], boxes: dict[str, list[Box]]) -> None:
    """Write a checkpoint of `tensors` in chunks with DCP's own writer."""
    folder.mkdir()
    writer = FileSystemWriter(folder, sync_files=False)
    writer.set_up_storage_writer(True)
    items, described = [], {}
    for key, tensor in tensors.items():
        properties = TensorProperties(dtype=tensor.dtype)
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes[key]]
        # Leave out empty chunks: another chunk may have the same offsets.
        chunks = [chunk for chunk in chunks if 0 not in chunk.sizes] or chunks[:1]
        described[key] = TensorStorageMetadata(properties, tensor.size(), chunks)
        items += [
            WriteItem(
                MetadataIndex(key, chunk.offsets, index),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, tensor.size()),
            )
            for index, chunk in enumerate(chunks)
        ]
    [plan] = writer.prepare_global_plan([SavePlan(items)])

    class Planner:
        def resolve_data(self, item: WriteItem) -> torch.Tensor:
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            return cut(tensors[item.index.fqn], (tuple(chunk.offsets), tuple(chunk.sizes)))

    results = writer.write_data(plan, Planner()).wait()  # type: ignore[arg-type]
    writer.finish(Metadata(dict(described)), [results])


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)
