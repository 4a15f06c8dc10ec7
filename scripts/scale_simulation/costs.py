"""The cost of the plans of all ranks, for stock DCP and for ours: the libraries' own functions, in CPU time.

The coordinator's share is everything that it does after the ranks' messages have arrived: unpickle, plan, pickle the
answers, unpickle the ranks' results, and make the metadata; transfers and writes are not included. A rank's share of a
load is everything between the bytes of the metadata and the first read.
"""

from __future__ import annotations

import gc
import math
import pickle
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from scale_simulation.files import SimulatedFiles, record_of_rank
from scale_simulation.plans import Mesh, Planned, box_in, held_by, item_of, num_bytes, outlines, plans_of_dcp
from torchtitan_lite.checkpoint.format.description import Description, table_of_objects
from torchtitan_lite.checkpoint.format.tensor_table import TensorTable
from torchtitan_lite.checkpoint.format.torch_contents import DTYPES
from torchtitan_lite.checkpoint.planning.joint_plan import JointPlan
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.checkpoint.reading.load_rules import EVERYTHING
from torchtitan_lite.checkpoint.reading.regions import overlaps
from torchtitan_lite.checkpoint.reading.stored_model import StoredModel
from torchtitan_lite.checkpoint.reading.stored_optimizer import ListedGroups, RankNumbers, StoredOptimizer
from torchtitan_lite.checkpoint.saving.writer import WrittenFile, received, written_files
from torchtitan_lite.checkpoint.state.optimizer_state import ParameterSlot
from torchtitan_lite.collection import no_collection
from torchtitan_lite.disk.digest import DIGEST_BYTES, FileRecord, num_blocks
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointKind, Manifest, Table
from torchtitan_lite.store.rank_records import FROM_RANKS
from torchtitan_lite.torch_private import storage_info

Figures = dict[str, float]
T = TypeVar("T")

RUNS = 3
"""Runs of everything that is timed; the fastest counts."""
MOST_RANKS_REPEATED = 20_000
"""Of more ranks everything runs once."""
DRAWN_RANKS = 64
"""The ranks that load, of more ranks; of fewer the first, the middle and the last."""


def stock(tensors: Sequence[Planned], mesh: Mesh) -> Figures:
    """Return the costs of DCP's DefaultSavePlanner and FileSystemWriter, for a first and a repeated (cached) save."""
    sent = [pickle.dumps(plan) for plan in plans_of_dcp(tensors, mesh)]

    def plan() -> tuple[list[SavePlan], Metadata, list[bytes]]:
        received = [pickle.loads(data) for data in sent]
        final, metadata = DefaultSavePlanner().create_global_plan(received)
        return final, metadata, [pickle.dumps(plan) for plan in final]

    planning_seconds, (final, metadata, answers) = _least(plan, mesh)
    results = [pickle.dumps(_results(rank, plan)) for rank, plan in enumerate(final)]

    def describe() -> bytes:
        where = {}
        for data in results:
            where.update({result.index: result.storage_data for result in pickle.loads(data)})
        metadata.storage_data = where
        return pickle.dumps(metadata)

    describing_seconds, pickled = _least(describe, mesh)
    return {
        "first_gathered_bytes": sum(map(len, sent)),
        "first_scattered_bytes": sum(map(len, answers)),
        "results_gathered_bytes": sum(map(len, results)),
        "first_coordinator_seconds": planning_seconds + describing_seconds,
        "cached_coordinator_seconds": describing_seconds,
        "metadata_bytes": len(pickled),
        "load_planning_seconds": _stock_load(pickled, tensors, mesh),
    }


def ours(tensors: Sequence[Planned], mesh: Mesh) -> Figures:
    """Return the costs of this project's plan, description, manifest and load: nothing is extrapolated."""
    own = list(outlines(tensors, mesh))
    sent = [pickle.dumps(each.outline) for each in own]

    def plan() -> tuple[Description, list[bytes], list[bytes]]:
        joint = JointPlan()
        with no_collection():
            asked = joint.ask([pickle.loads(data) for data in sent])
            for_ranks = [pickle.dumps((each, None)) for each in asked]
            pieces = [pickle.dumps(each.of(wanted)) for each, wanted in zip(own, asked, strict=True)]
            answers = joint.answers([pickle.loads(data) for data in pieces])
            for_ranks += [pickle.dumps((each, None)) for each in answers]
        assert joint.description is not None
        return joint.description, pieces, for_ranks

    planning_seconds, (description, pieces, answered) = _least(plan, mesh)
    file_bytes = _longest(description)
    records = _records(mesh, file_bytes)
    votes = [pickle.dumps((None, None))] * mesh.size

    def save() -> bytes:
        """Do what the coordinator does at every save: read the ranks' votes, name the place, and make the manifest."""
        with no_collection():
            assert not any(failure for _, failure in map(pickle.loads, votes))
            assert pickle.dumps(("step-1.staging", {}))
            return _manifest(description, records)

    manifest_seconds, made = _least(save, mesh)
    return {
        "first_gathered_bytes": sum(map(len, sent)) + sum(map(len, pieces)),
        "first_scattered_bytes": sum(map(len, answered)),
        "results_gathered_bytes": sum(map(len, [*votes, *records])),
        "first_coordinator_seconds": planning_seconds + manifest_seconds,
        "cached_coordinator_seconds": manifest_seconds,
        "manifest_bytes": len(made),
        "metadata_bytes": len(description.metadata([])[0]) if description.has_metadata("auto") else 0,
        "load_planning_seconds": _our_load(made, tensors, mesh, file_bytes),
    }


def _longest(description: Description) -> int:
    """Return the bytes of the longest file; all are taken to be as long."""
    tensors = TensorTable.parse(Table.of_text(description.tensors.text, ""), DTYPES)
    ends = [0]
    for tensor in tensors.values():
        parts = tensor.chunks if tensor.runs is None else tensor.runs.runs
        ends += [(part.at or 0) + math.prod(part.sizes) * tensor.dtype.itemsize for part in parts]
    return max(ends)


def _records(mesh: Mesh, size: int) -> list[bytes]:
    """Return what each rank sends at every save about the files that it wrote."""
    blocks = bytes(DIGEST_BYTES * num_blocks(size))
    if mesh.size < FROM_RANKS:
        file = WrittenFile(size, blocks)
    else:
        of_rank = FileRecord.of(record_of_rank(size))
        file = WrittenFile(size, b"", record_size=of_rank.size, record_blocks=of_rank.blocks)
    return [pickle.dumps((tuple(file), None))] * mesh.size


def _manifest(description: Description, records: Sequence[bytes]) -> bytes:
    """Return the manifest of a save, made from the ranks' records as the coordinator makes it."""
    with no_collection():
        by_rank = received([pickle.loads(data)[0] for data in records])
        return Manifest(
            step=1,
            kind=CheckpointKind.FULL,
            created_at=0.0,
            world_size=len(by_rank),
            versions={},
            lineage=Lineage("simulated"),
            files=written_files(by_rank, len(by_rank)),
            tensors=description.tensors,
            objects=table_of_objects([]),
            structure=description.structure,
        ).to_readable_json()


def _stock_load(pickled: bytes, tensors: Sequence[Planned], mesh: Mesh) -> float:
    rank = mesh.size // 2
    mine = [item_of(tensor, rank, mesh) for tensor in held_by(rank, tensors, mesh)]

    def plan() -> None:
        metadata: Metadata = pickle.loads(pickled)
        for item in mine:
            described: Any = metadata.state_dict_metadata[item.index.fqn]
            assert item.tensor_data is not None
            assert isinstance(described, TensorStorageMetadata)
            chunk = item.tensor_data.chunk
            create_read_items_for_chunk_list(
                item.index.fqn, described, [ChunkStorageMetadata(chunk.offsets, chunk.sizes)]
            )

    return _least(plan, mesh)[0]


def _our_load(manifest: bytes, tensors: Sequence[Planned], mesh: Mesh, file_bytes: int) -> float:
    """Return the seconds that the slowest of some ranks takes from the bytes of the manifest to its first read.

    That is everything: the tables, its own record, the files' sizes, whether the files can hold the tensors, the
    reports of model and optimizer, and which bytes it reads for each of its shards.
    """
    files = SimulatedFiles(manifest, record_of_rank(file_bytes), file_bytes)
    seconds = {rank: _load_of(rank, files, tensors, mesh) for rank in drawn(mesh)}
    # Of runs at different times the slowest one would be that of other processes.
    slowest = sorted(seconds, key=lambda rank: seconds[rank])[-RUNS:]
    return max(min(_load_of(rank, files, tensors, mesh) for _ in range(RUNS)) for rank in slowest)


def drawn(mesh: Mesh) -> list[int]:
    """Return the ranks that load: the first, the middle and the last; of many also those around a stage, and others."""
    ranks = {0, mesh.size // 2, mesh.size - 1}
    if mesh.size > MOST_RANKS_REPEATED:
        ranks |= {mesh.of_stage - 1, mesh.of_stage % mesh.size}
        ranks |= {*random.Random(mesh.size).sample(range(mesh.size), DRAWN_RANKS - len(ranks))}
    return sorted(ranks)


def _load_of(rank: int, files: SimulatedFiles, tensors: Sequence[Planned], mesh: Mesh) -> float:
    held = [tensor for tensor in held_by(rank, tensors, mesh) if tensor.kind != "own"]
    mine = [(tensor, box_in(tensor, rank, mesh)) for tensor in held]
    targets = [torch.empty(box.sizes, device="meta") for _, box in mine]
    whole = {tensor.fqn: torch.empty(tensor.shape, device="meta") for tensor in held}
    model = {key.removeprefix("model."): value for key, value in whole.items() if key.startswith("model.")}
    slots = {name: ParameterSlot([name], (0, 0), like, {}, _state_of(name, whole)) for name, like in model.items()}

    def plan() -> None:
        with no_collection():
            where: dict[str, Any] = {"rank": rank, "world_size": mesh.size, "record_of": rank}
            folder = CheckpointFolder(Path("simulated"), files=files, **where)
            contents = folder.contents
            stored = StoredModel(contents, EVERYTHING)
            stored.report(model)
            names, numbers = stored.names("model."), RankNumbers(rank, mesh.size, mesh.size)
            StoredOptimizer(contents, EVERYTHING, names, ListedGroups(), slots, numbers, {}).report()
            for (tensor, box), target in zip(mine, targets, strict=True):
                list(overlaps(tensor.fqn, contents.tensors[tensor.fqn], box.offsets, target))

    return _least(plan, mesh)[0]


def _state_of(name: str, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    prefix = f"optimizer.state.{name}."
    return {key: whole[prefix + key] for key in ("exp_avg", "exp_avg_sq", "step")}


def _results(rank: int, plan: SavePlan) -> list[WriteResult]:
    """Return the results that DCP's writer sends for the items of `plan`."""
    name, at, results = layout.data_file(rank, 0), 0, []
    for item in plan.items:
        assert item.tensor_data is not None
        size = item.tensor_data.chunk.sizes.numel() * 4 + 1100
        results.append(WriteResult(item.index, size, storage_info()(name, at, size)))
        at += size
    return results


def _least(work: Callable[[], T], mesh: Mesh) -> tuple[float, T]:
    """Return the least CPU time of `RUNS` runs of `work`, and its result: other processes can only add time."""
    seconds = []
    for _ in range(RUNS if mesh.size <= MOST_RANKS_REPEATED else 1):
        made = None  # Keeps the result of the last run out of garbage collection.
        gc.collect()
        began = time.process_time()
        made = work()
        seconds.append(time.process_time() - began)
    return min(seconds), made  # type: ignore[return-value]  # there is at least one run


__all__ = ["Figures", "num_bytes", "ours", "stock"]
