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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

import torchtitan_lite
from torchtitan_lite.checkpoint.tensor_digest import Digest, digest_chunk, finish
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.log import logger
from torchtitan_lite.store import durable, layout
from torchtitan_lite.store.lineage import Lineage, abandoned_by
from torchtitan_lite.store.manifest import CheckpointKind, FileRecord, Manifest
from torchtitan_lite.store.store import CheckpointStore

DCP_VERSION = "1.0.0"
"""What DCP's own writer puts into `Metadata.version`."""


@dataclass(frozen=True)
class Origin:
    """What a manifest says of the run that a checkpoint is of."""

    lineage: Lineage
    topology: str
    config: dict[str, Any]
    tensor_digests: bool = False
    """Whether it has a digest of each tensor."""


@dataclass(frozen=True)
class DigestedResult(WriteResult):
    """A `WriteResult` with the written chunk's share of its tensor's digest."""

    digest: Digest = field(default_factory=Digest.zero)


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
        self,
        store: CheckpointStore,
        step: int,
        kind: CheckpointKind,
        origin: Origin,
        *,
        write_items: WriteItems = write_items,
    ) -> None:
        self._store, self._step, self._kind, self._origin = store, step, kind, origin
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
            _refuse_what_no_load_would_take(items)
            results = self._write_items(self._store.stage(self._step) / plan.storage_data, items)
            if self._origin.tensor_digests:
                results = _with_digests(results, plan.items, [data for _, data in items])
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
        self._tell_what_is_replaced()
        tensors = _tensor_digests(written, metadata) if self._origin.tensor_digests else {}
        self._store.commit(self._step, self._manifest(sizes, tensors, world_size=len(results)))

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self._store.root / layout.step_dir(self._step)), save_id=self._save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str | Path)

    def _tell_what_is_replaced(self) -> None:
        try:
            there = self._store.get(self._step)
        except CheckpointError:
            return
        if there.kind is not self._kind:
            logger.info("step %d: a %s checkpoint replaces the %s one.", self._step, self._kind.value, there.kind.value)

    def _manifest(self, sizes: dict[str, int], tensors: dict[str, str], world_size: int) -> Manifest:
        lineage = self._origin.lineage
        abandons = abandoned_by(lineage.run_id, lineage.branch_point, self._store.intact())
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
            lineage=dataclasses.replace(lineage, abandons=abandons),
            extra={"topology": self._origin.topology, "config": self._origin.config, "tensor_digests": tensors},
        )


def _payload(data: torch.Tensor | io.BytesIO) -> torch.Tensor | bytes:
    return data.getvalue() if isinstance(data, io.BytesIO) else data


def _refuse_what_no_load_would_take(items: Sequence[tuple[MetadataIndex, torch.Tensor | bytes]]) -> None:
    """Raises TypeError for an object that `torch.load(weights_only=True)` refuses: now, and not when it is needed."""
    for index, data in items:
        # The settings of an optimizer's groups are numbers, and there are several for each parameter.
        if isinstance(data, bytes) and not index.fqn.startswith("optimizer.param_groups."):
            try:
                torch.load(io.BytesIO(data), weights_only=True)
            except Exception as error:
                raise TypeError(
                    f"{index.fqn} holds an object that could not be loaded again ({str(error).splitlines()[0]}). "
                    "Return tensors, numbers, strings, lists and dicts from state_dict."
                ) from None


def _with_digests(
    results: Sequence[WriteResult], items: Sequence[WriteItem], written: Sequence[torch.Tensor | bytes]
) -> list[WriteResult]:
    digested: list[WriteResult] = []
    for result, item, data in zip(results, items, written, strict=True):
        if isinstance(data, bytes) or item.tensor_data is None:
            digested.append(result)
            continue
        described = item.tensor_data
        digest = digest_chunk(data.detach().cpu(), global_shape=described.size, offsets=described.chunk.offsets)
        digested.append(DigestedResult(result.index, result.size_in_bytes, result.storage_data, digest))
    return digested


def _tensor_digests(written: Sequence[WriteResult], metadata: Metadata) -> dict[str, str]:
    """Each tensor's digest, added up over its chunks, by key."""
    total: dict[str, Digest] = {}
    for result in written:
        if isinstance(result, DigestedResult):
            total[result.index.fqn] = total.get(result.index.fqn, Digest.zero()) + result.digest
    described = {key: metadata.state_dict_metadata[key] for key in total}
    return {
        key: finish(total[key], tensor.properties.dtype, tensor.size).to_hex()
        for key, tensor in described.items()
        if isinstance(tensor, TensorStorageMetadata)
    }


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
