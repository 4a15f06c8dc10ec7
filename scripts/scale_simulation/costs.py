"""The cost of the plans of all ranks, for stock DCP and for ours: the libraries' own functions, in CPU time.

The coordinator's share is everything that it does after the ranks' messages have arrived: unpickle, plan, pickle the
answers, unpickle the ranks' results, and make the metadata; transfers and writes are not included. A rank's share of a
load is everything between the bytes of the metadata and the first read.
"""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from scale_simulation.plans import Mesh, Planned, item_of, num_bytes, plans, plans_of_dcp
from scale_simulation.tables import table_of
from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.checkpoint.format.description import Description, PickledMetadata
from torchtitan_lite.checkpoint.format.flattening import flatten
from torchtitan_lite.checkpoint.format.structure import encode
from torchtitan_lite.checkpoint.planning.plan_cache import _Answers
from torchtitan_lite.checkpoint.reading.own_plan import overlaps
from torchtitan_lite.checkpoint.saving.writer import WrittenFile
from torchtitan_lite.collection import no_collection
from torchtitan_lite.disk.digest import DIGEST_BYTES, FileRecord, num_blocks
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointKind, Manifest, Table
from torchtitan_lite.torch_private import storage_info

Figures = dict[str, float]
T = TypeVar("T")

RUNS = 3
"""Runs of everything that is timed; the fastest counts."""
MAX_TEXT_BYTES = 256 << 20
"""Largest table of tensors that is made for a timing; the time of a longer table grows with its bytes."""


def stock(tensors: Sequence[Planned], mesh: Mesh) -> Figures:
    """Return the costs of DCP's DefaultSavePlanner and FileSystemWriter, for a first and a repeated (cached) save."""
    sent = [pickle.dumps(plan) for plan in plans_of_dcp(tensors, mesh)]

    def plan() -> tuple[list[SavePlan], Metadata, list[bytes]]:
        received = [pickle.loads(data) for data in sent]
        final, metadata = DefaultSavePlanner().create_global_plan(received)
        return final, metadata, [pickle.dumps(plan) for plan in final]

    planning_seconds, (final, metadata, answers) = _least(plan)
    results = [pickle.dumps(_results(rank, plan)) for rank, plan in enumerate(final)]

    def describe() -> bytes:
        where = {}
        for data in results:
            where.update({result.index: result.storage_data for result in pickle.loads(data)})
        metadata.storage_data = where
        return pickle.dumps(metadata)

    describing_seconds, pickled = _least(describe)
    return {
        "first_gathered_bytes": sum(map(len, sent)),
        "first_scattered_bytes": sum(map(len, answers)),
        "results_gathered_bytes": sum(map(len, results)),
        "first_coordinator_seconds": planning_seconds + describing_seconds,
        "cached_coordinator_seconds": describing_seconds,
        "metadata_bytes": len(pickled),
        "load_planning_seconds": _stock_load(pickled, tensors, mesh),
    }


def ours(tensors: Sequence[Planned], mesh: Mesh, all_bytes: int) -> Figures:
    """Return the costs of this project's plan, description and manifest. The files of all ranks have `all_bytes`."""
    sent = [pickle.dumps(plan) for plan in plans(tensors, mesh)]
    records = _records(mesh, all_bytes)

    def plan() -> tuple[Description, list[bytes]]:
        answers = _Answers(None)
        with no_collection():
            of_ranks = answers.of_all([pickle.loads(data) for data in sent])
        assert answers.description is not None
        return answers.description, [pickle.dumps((answer, None)) for answer in of_ranks]

    def save() -> tuple[Description, list[bytes], bytes]:
        description, answered = plan()
        return description, answered, _manifest(description, records)

    seconds, (description, answered, made) = _least(save)
    return {
        "first_gathered_bytes": sum(map(len, sent)),
        "first_scattered_bytes": sum(map(len, answered)),
        "results_gathered_bytes": sum(map(len, records)),
        "first_coordinator_seconds": seconds,
        "manifest_bytes": len(made),
        "table_bytes": len(description.tensors.text),
        "metadata_bytes": len(description.metadata([]).data),
        "load_planning_seconds": _our_load(made, tensors, mesh, all_bytes),
    }


def our_load(tensors: Sequence[Planned], mesh: Mesh, all_bytes: int) -> Figures:
    """Return the costs of a load of all `tensors`, of one FSDP group, and the sizes of what it reads: nothing is
    extrapolated.
    """
    entries = table_of(tensors, mesh)
    state: dict[str, dict[str, int]] = {}
    for key in entries:
        owner, _, name = key.partition(".")
        state.setdefault(owner, {})[name] = 0
    table = Table(entries)
    manifest = _manifest(_Of(table, Table({"root": encode(flatten(state)[1])})), _records(mesh, all_bytes))
    return {
        "manifest_bytes": len(manifest),
        "table_bytes": len(table.text),
        "load_planning_seconds": _our_load(manifest, tensors, mesh, all_bytes),
    }


def our_repeated_seconds(mesh: Mesh, all_bytes: int, table_bytes: float) -> float:
    """Return the coordinator's seconds for a repeated save with a table of tensors of this size.

    A repeated save only copies and digests this text, which the first save made, and writes .metadata as it was. The
    records of the files are there for all ranks.
    """
    shown = min(1.0, MAX_TEXT_BYTES / max(table_bytes, 1))
    records = _records(mesh, all_bytes)
    base, with_text = (
        _least(lambda made=made: _manifest(made, records))[0]
        for made in (_of_length(0), _of_length(int(shown * table_bytes)))
    )
    return base + max(0.0, with_text - base) / shown


class _Of:
    """A description with these tables."""

    def __init__(self, tensors: Table, structure: Table) -> None:
        self.tensors = tensors
        self.structure = structure

    def metadata(self, placed: Sequence[Any]) -> PickledMetadata:
        return PickledMetadata(b"", FileRecord.of(b""))

    def objects(self, placed: Sequence[Any]) -> Table:
        return Table()


def _of_length(table_bytes: int) -> _Of:
    """Return a description whose table has only the right length."""
    return _Of(Table.of_text(b"x" * table_bytes, ""), Table())


def _records(mesh: Mesh, all_bytes: int) -> list[bytes]:
    """Return what each rank sends at every save: an empty plan, and the record of its file."""
    size = all_bytes // mesh.size
    return [
        data
        for rank in range(mesh.size)
        for data in (
            pickle.dumps(SavePlan([])),
            pickle.dumps([WrittenFile(layout.data_file(rank, 0), FileRecord(size, _blocks(size)), [])]),
        )
    ]


def _manifest(description: Description | _Of, records: Sequence[bytes]) -> bytes:
    """Return the manifest of a save, made from the ranks' records as the coordinator makes it."""
    received = [pickle.loads(data) for data in records]
    files = [file for data in received if isinstance(data, list) for file in data]
    return Manifest(
        step=1,
        kind=CheckpointKind.FULL,
        created_at=0.0,
        world_size=len(files),
        versions={},
        lineage=Lineage("simulated"),
        files={file.name: file.record for file in files} | {layout.METADATA: description.metadata([]).record},
        tensors=description.tensors,
        objects=description.objects([]),
        structure=description.structure,
    ).to_json()


def _stock_load(pickled: bytes, tensors: Sequence[Planned], mesh: Mesh) -> float:
    mine = [item_of(tensor, mesh.size // 2, mesh) for tensor in tensors]

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

    return _least(plan)[0]


def _our_load(manifest: bytes, tensors: Sequence[Planned], mesh: Mesh, all_bytes: int) -> float:
    mine = [item_of(tensor, mesh.size // 2, mesh) for tensor in tensors]
    targets = []
    for item in mine:
        assert item.tensor_data is not None
        targets.append(torch.empty(item.tensor_data.chunk.sizes, device="meta"))
    # The files are as large as with all tensors, also for a sample.
    sizes = {layout.data_file(rank, 0): max(all_bytes, 1 << 62) for rank in range(mesh.size)}

    def plan() -> None:
        with no_collection():
            contents = Contents.of_manifest(Manifest.parse(manifest), "simulated")
            contents.check(sizes)
            for item, target in zip(mine, targets, strict=True):
                stored = contents.tensors[item.index.fqn]
                assert item.index.offset is not None
                list(overlaps(item.index.fqn, stored, tuple(item.index.offset), target))

    return _least(plan)[0]


def _results(rank: int, plan: SavePlan) -> list[WriteResult]:
    """Return the results that DCP's writer sends for the items of `plan`."""
    name, at, results = layout.data_file(rank, 0), 0, []
    for item in plan.items:
        assert item.tensor_data is not None
        size = item.tensor_data.chunk.sizes.numel() * 4 + 1100
        results.append(WriteResult(item.index, size, storage_info()(name, at, size)))
        at += size
    return results


def _blocks(size: int) -> bytes:
    return bytes(DIGEST_BYTES * num_blocks(size))


def _least(work: Callable[[], T]) -> tuple[float, T]:
    """Return the least CPU time of `RUNS` runs of `work`, and its result: other processes can only add time."""
    seconds = []
    for _ in range(RUNS):
        made = None  # Keeps the result of the last run out of garbage collection.
        gc.collect()
        began = time.process_time()
        made = work()
        seconds.append(time.process_time() - began)
    return min(seconds), made  # type: ignore[return-value]  # RUNS is at least 1.


__all__ = ["Figures", "num_bytes", "our_load", "our_repeated_seconds", "ours", "stock"]
