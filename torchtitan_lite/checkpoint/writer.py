"""DCP's writing side: every rank writes into a staging folder, the coordinator commits it.

DCP is a two-phase commit already: `write_data` on every rank is the preparation, the gathered
results are the vote, and `finish` runs on the coordinator alone, after every rank succeeded. So the
commit is in `finish` and nowhere else. What a rank writes is one file of `torch.save` items, as
DCP's own writer makes them, so that any DCP reader reads it.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import platform
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

import torchtitan_lite
from torchtitan_lite.store import durable, layout
from torchtitan_lite.store.manifest import CheckpointKind, FileRecord, Manifest
from torchtitan_lite.store.store import CheckpointStore

DCP_VERSION = "1.0.0"
"""What DCP's own writer puts into `Metadata.version`."""

WriteItems = Callable[[Path, Sequence[tuple[MetadataIndex, "torch.Tensor | bytes"]]], list[WriteResult]]
"""Writes one file, durably, and says where in it each item lies."""


def write_items(path: Path, items: Sequence[tuple[MetadataIndex, torch.Tensor | bytes]]) -> list[WriteResult]:
    """Writes `items` one after another into a new file at `path` and syncs it. Any rank, any thread."""
    results = []
    with path.open("wb") as file:
        for index, data in items:
            offset = file.tell()
            if isinstance(data, bytes):
                file.write(data)
            else:
                torch.save(_own_storage(data), file)
            length = file.tell() - offset
            results.append(WriteResult(index, length, _StorageInfo(path.name, offset, length)))
        file.flush()
        durable.fsync_file(file.fileno())
    return results


class CommittingWriter(StorageWriter):
    """Makes `step-N` of `store` appear, whole, or not at all. One instance a save."""

    def __init__(
        self, store: CheckpointStore, step: int, kind: CheckpointKind, *, write_items: WriteItems = write_items
    ) -> None:
        self._store, self._step, self._kind = store, step, kind
        self._write_items = write_items
        self._save_id = str(uuid.uuid4())

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: the place is given at construction."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self._store.clear_staging(self._step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [dataclasses.replace(plan, storage_data=layout.data_file(rank, 0)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        if plan.items:
            items = [(item.index, _payload(planner.resolve_data(item))) for item in plan.items]
            results = self._write_items(self._store.stage(self._step) / plan.storage_data, items)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [result for per_rank in results for result in per_rank]
        metadata.version = DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for result in written}
        metadata.storage_meta = self.storage_meta()
        pickled = pickle.dumps(metadata)
        durable.write_file(self._store.stage(self._step) / layout.METADATA, pickled)
        sizes = _file_sizes(written) | {layout.METADATA: len(pickled)}
        self._store.commit(self._step, self._manifest(sizes, world_size=len(results)))

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self._store.root / layout.step_dir(self._step)), save_id=self._save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str | Path)

    def _manifest(self, sizes: dict[str, int], world_size: int) -> Manifest:
        return Manifest(
            step=self._step,
            kind=self._kind,
            created_at=time.time(),
            world_size=world_size,
            versions={
                "torchtitan_lite": torchtitan_lite.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            files={name: FileRecord(size=size) for name, size in sizes.items()},
        )


def _payload(data: torch.Tensor | io.BytesIO) -> torch.Tensor | bytes:
    return data.getvalue() if isinstance(data, io.BytesIO) else data


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    # torch.save writes the whole storage of a view.
    on_cpu = tensor.detach().cpu()
    whole = on_cpu.untyped_storage().size() == on_cpu.numel() * on_cpu.element_size()
    return on_cpu if whole else on_cpu.clone()


def _file_sizes(written: Sequence[WriteResult]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for result in written:
        info = result.storage_data
        sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
    return sizes
