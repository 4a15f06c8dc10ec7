"""DCP's writing side: every rank writes its file into a staging folder, the coordinator commits them.

DCP is a two-phase commit already: `write_data` on every rank is the preparation, the gathered
results are the vote, and `finish` runs on the coordinator only, after every rank succeeded. So the
commit is in `finish` and nowhere else. The ranks agreed before who writes what (planning/plan_cache.py), so a
save sends only the digests of each file and the objects in it.
"""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

import torchtitan_lite
from torchtitan_lite import faults
from torchtitan_lite.checkpoint.format.description import Description, PlacedObject
from torchtitan_lite.checkpoint.format.tensor_digest import TensorDigest, digest_chunk, finish
from torchtitan_lite.checkpoint.format.torch_contents import DTYPES
from torchtitan_lite.checkpoint.planning.rank_file import RankPlan
from torchtitan_lite.checkpoint.saving.agreed_planner import AgreedPlan, AgreedPlanner
from torchtitan_lite.checkpoint.saving.nan_check import OPTIMIZER, names_with_nan
from torchtitan_lite.checkpoint.schedule.interval import NOTHING_AT_RISK, AtRisk
from torchtitan_lite.config.sections.checkpoint import DcpMetadata
from torchtitan_lite.disk.block_writer import in_memory
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.new_file import NewFile
from torchtitan_lite.distributed import dcp
from torchtitan_lite.distributed.host_tree import Sent, SentApart
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.files_of_ranks import Files, FilesOfRanks, together
from torchtitan_lite.store.lineage import Lineage, abandoned_by
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind, Manifest
from torchtitan_lite.store.manifest_fields import (
    DCP_METADATA,
    LEFT_OUT,
    METRICS,
    NAN_IN,
    RANKS_DIFFER,
    RESUMED_FROM_MEMORY,
    START,
    TRAINED_SECONDS,
)
from torchtitan_lite.store.protocol import StoresCheckpoints


@dataclass(frozen=True)
class Origin:
    """What a manifest records about the run that saved the checkpoint."""

    lineage: Lineage
    topology: str
    config: dict[str, Any]
    tensor_digests: bool = False
    """Whether the manifest gets a digest of each tensor."""
    dcp_metadata: DcpMetadata = "auto"
    """Whether DCP's `.metadata` is written."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the run measured at the step that is saved, all finite."""
    start: str = ""
    """The id of this start of the job, with which images in memory are compared; empty if it keeps none."""
    image_of: int = -1
    """The step of the image in memory that this start resumed from; -1 if it loaded from disk, or nothing."""
    trained_seconds: float = 0.0
    """That the run had trained, in all its starts, when the state was made."""
    at_risk: AtRisk = NOTHING_AT_RISK
    """What the disk lacked then. Not in the manifest."""


def free() -> None:
    """Do nothing: no fence, no check, nothing to wait for."""


def ignore_slowest(rank: int, seconds: float) -> None:
    """Do nothing with the slowest rank of a save."""


@dataclass(frozen=True)
class SaveTarget:
    """The checkpoint that a save creates."""

    store: StoresCheckpoints
    step: int
    kind: CheckpointKind
    origin: Origin
    fence: Callable[[], None] = free
    """Raises `LeaseLost` if the folder belongs to another job by now; called right before the commit. Coordinator."""
    check: Callable[[], None] = free
    """Raises if the save cannot succeed; called before planning. Acts on the coordinator only."""
    writes_anyway: bool = False
    """Whether the checkpoint is written although ranks hold different values under one name: no save follows."""
    ranks_differ: Sequence[str] = ()
    """Where ranks were found to differ that were equal before: the manifest says so."""
    note_slowest: Callable[[int, float], None] = ignore_slowest
    """Called before the commit with the rank that took longest to write its file, and its seconds. Coordinator."""
    note_place: Callable[[str], object] = str
    """Called with the name of the save's place, before any rank writes there. Coordinator."""


@dataclass(frozen=True)
class RankContent:
    """A rank's file and the way to write it, from staged or from live tensors."""

    plan: RankPlan
    objects: Sequence[PlacedObject]
    num_bytes: int
    tensors: Callable[[], Sequence[torch.Tensor]]
    """Returns the tensors that are written, in file order, for digests and the search for NaN."""
    write: Callable[[NewFile], FileRecord]
    """Writes this rank's file, durably."""
    wait: Callable[[], None] = free
    """Returns when the state may change. Raises RuntimeError if it changed while it was copied."""


class Details(NamedTuple):
    """What may be long, or empty, of a rank's report about its file."""

    objects: Sequence[PlacedObject] = ()
    digests: Mapping[str, TensorDigest] = {}  # never changed
    """By key, the part of each tensor's digest that comes from this file."""
    nan_in: Sequence[str] = ()
    """Keys of weights and optimizer states in which NaN was seen."""


class WrittenFile(NamedTuple):
    """A rank's report to the coordinator about the file that it wrote.

    It travels as a plain tuple of plain values, which pickle reads five times as fast.
    """

    size: int
    """Bytes of its file of tensors."""
    blocks: bytes
    """The digests of the blocks of that; empty if they are in its record."""
    details: Sent | None = None
    """Its `Details`; None if they are empty."""
    record_size: int | None = None
    """Bytes of its record; None if it has none."""
    record_blocks: bytes = b""
    """The digests of the blocks of that."""
    seconds: float = 0.0
    """Seconds that the rank took to write it, with its digests."""


class CommittingWriter(StorageWriter):
    """Writes this rank's file, and on the coordinator commits `target`: it appears complete or not at all.

    One instance a save.
    """

    def __init__(self, target: SaveTarget, content: RankContent | None, group: dist.ProcessGroup | None = None) -> None:
        self._target, self._content = target, content
        self._details = SentApart[Details](group)
        self._place = ""
        self.committed: CheckpointInfo | None = None
        """What was committed: on the coordinator, after `finish`; else None."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: the constructor has the place."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the place of the save is made with the global plan."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # On the coordinator alone, in the planning phase, which ends on all ranks before any of them writes. The plans
        # bring the name of the place to the ranks.
        assert self._content is not None, "the coordinator has a plan, or raised before"
        self._place = self._target.store.begin(self._target.step)
        self._target.note_place(self._place)
        return [AgreedPlan(self._place)] * len(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[Any]] = Future()
        future.set_result(self._written(plan.storage_data))
        return future

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write metadata and manifest, and commit. **Coordinator only**.

        `results` has for each rank a list of at most one `WrittenFile`, as a tuple.
        """
        assert self._content is not None
        target, description = self._target, self._content.plan.description
        assert description is not None, "the coordinator describes"
        by_rank = received(results)
        details = [
            self._details.received(rank, file.details) for rank, file in by_rank.items() if file.details is not None
        ]
        objects = [placed for each in details for placed in each.objects]
        nan_in = sorted({key for each in details for key in each.nan_in})
        listed = files_of(by_rank, len(results))
        target.fence()  # The staging folder may belong to another job by now.
        faults.point("metadata", step=target.step)
        if by_rank:
            slowest = max(by_rank, key=lambda rank: by_rank[rank].seconds)
            target.note_slowest(slowest, by_rank[slowest].seconds)
        has_metadata = description.has_metadata(target.origin.dcp_metadata)
        if has_metadata:
            described = description.metadata(objects)
            target.store.add_metadata(self._place, described.data)
            listed |= {layout.METADATA: described.record}
        manifest = Manifest(
            step=target.step,
            kind=target.kind,
            created_at=time.time(),
            world_size=len(results),
            versions=versions(),
            files=listed,
            lineage=self._lineage(),
            tensors=description.tensors,
            objects=description.objects(objects, with_places=not has_metadata),
            structure=description.structure,
            extra={
                "topology": target.origin.topology,
                "config": target.origin.config,
                "tensor_digests": _tensor_digests([each.digests for each in details], description),
                **({} if has_metadata else {DCP_METADATA: LEFT_OUT}),
                **_found_wrong(nan_in, target.ranks_differ),
                **({METRICS: dict(target.origin.metrics)} if target.origin.metrics else {}),
                **_of_start(target.origin),
            },
        )
        self.committed = target.store.commit(target.step, manifest, target.fence, place=self._place)
        _warn_of_nan(target.step, nan_in)

    def storage_meta(self) -> StorageMeta | None:
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str | Path)

    def _written(self, place: str) -> list[tuple[Any, ...]]:
        content, target = self._content, self._target
        assert content is not None, "AgreedPlanner raised the failure before"
        if content.num_bytes == 0:
            return []
        plan, began = content.plan, time.perf_counter()
        record = content.write(target.store.new_file(place, plan.file_name))
        # From the copy and in the saver's thread, where there is one: no step waits for it.
        digests = _shares(plan, content.tensors()) if target.origin.tensor_digests else {}
        objects, own, of_rank = content.objects, plan.own, None
        if own is not None:
            text = own.record(record, objects).to_json()
            of_rank = target.store.new_file(place, own.file_name).write(in_memory(text))
            record, objects = FileRecord(record.size), own.without(objects)
        prefix = "model." if target.kind is CheckpointKind.FULL else ""
        nan_in = names_with_nan(plan.items, content.tensors(), prefix)
        seconds = time.perf_counter() - began
        record_size, record_blocks = (None, b"") if of_rank is None else (of_rank.size, of_rank.blocks)
        details = Details(objects, digests, nan_in)
        sent = self._details.send(details) if any(details) else None
        return [tuple(WrittenFile(record.size, record.blocks, sent, record_size, record_blocks, seconds))]

    def _lineage(self) -> Lineage:
        lineage = self._target.origin.lineage
        if lineage.last_kept is None:
            return lineage
        abandons = abandoned_by(lineage.run_id, lineage.last_kept, self._target.store.listed())
        return dataclasses.replace(lineage, abandons=abandons)


def commit(
    content: RankContent | None,
    failure: Exception | None,
    target: SaveTarget,
    peers: Peers,
    group: dist.ProcessGroup | None,
) -> CheckpointInfo | None:
    """Write `content` and commit `target`; return what was committed on the coordinator, else None.

    **Collective** over `group`, any thread. `failure` is what failed on this rank before, if anything did. Raises
    `SaveFailed` or `LeaseLost` on every rank if one rank failed.
    """
    writer, planner = CommittingWriter(target, content, group), AgreedPlanner(failure)
    try:
        dcp.save({}, writer, planner, group, target.step)
    except CheckpointError as error:
        peers.is_group_in_doubt |= not dcp.is_group_whole(error)
        raise
    return writer.committed


def received(results: Sequence[Sequence[tuple[Any, ...]]]) -> dict[int, WrittenFile]:
    """Return what the ranks that wrote a file sent, by rank."""
    return {rank: WrittenFile(*file) for rank, per_rank in enumerate(results) for file in per_rank}


def files_of(by_rank: Mapping[int, WrittenFile], world_size: int) -> Files:
    """Return the files that the ranks wrote: in columns if the ranks have records; all have one, or none has."""
    if all(file.record_size is None for file in by_rank.values()):
        return {layout.data_file(rank, 0): FileRecord(file.size, file.blocks) for rank, file in by_rank.items()}
    sizes: list[int | None] = [None] * world_size
    record_sizes = [*sizes]
    for rank, file in by_rank.items():
        sizes[rank], record_sizes[rank] = file.size, file.record_size
    return together({}, FilesOfRanks(sizes, record_sizes, b"".join(file.record_blocks for file in by_rank.values())))


def versions() -> dict[str, str]:
    """Return the versions that a manifest records."""
    return {
        "torchtitan_lite": torchtitan_lite.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _found_wrong(nan_in: Sequence[str], ranks_differ: Sequence[str]) -> dict[str, Any]:
    """Return what was found wrong with the state: with either, the checkpoint counts as no good one."""
    found = {NAN_IN: list(nan_in), RANKS_DIFFER: list(ranks_differ)}
    return {name: texts for name, texts in found.items() if texts}


def _warn_of_nan(step: int, nan_in: Sequence[str]) -> None:
    """Warn, where there is some: a refused save would end runs that a person would rather inspect."""
    if nan_in:
        logger.warning(
            "Step %d is saved with %s (%s). Retention keeps the latest checkpoint without it",
            step,
            "NaN or infinity in its optimizer states" if nan_in[0].startswith(OPTIMIZER) else "NaN in its weights",
            ", ".join(nan_in[:3]) + (f" and {len(nan_in) - 3} more" if len(nan_in) > 3 else ""),
        )


def _of_start(origin: Origin) -> dict[str, Any]:
    """Return what only a start that keeps images records: later ones compare images with it."""
    of_images = {START: origin.start, TRAINED_SECONDS: origin.trained_seconds} if origin.start else {}
    return of_images | ({RESUMED_FROM_MEMORY: origin.image_of} if origin.image_of >= 0 else {})


def _tensor_digests(shares: Sequence[Mapping[str, TensorDigest]], description: Description) -> dict[str, str]:
    """Return each tensor's digest by key, summed over its chunks."""
    total: dict[str, TensorDigest] = {}
    for share in shares:
        for key, digest in share.items():
            total[key] = total.get(key, TensorDigest.zero()) + digest
    found: dict[str, str] = {}
    for key, digest in total.items():
        entry = description.tensors[key]
        found[key] = finish(digest, DTYPES[entry["dtype"]], entry["shape"]).to_hex()
    return found


def _shares(plan: RankPlan, written: Sequence[torch.Tensor]) -> dict[str, TensorDigest]:
    shares: dict[str, TensorDigest] = {}
    for item, tensor in zip(plan.items, written, strict=True):
        assert item.tensor_data is not None
        if plan.own is not None and item.index.fqn in plan.own.tensors:
            continue
        data, key = item.tensor_data, item.index.fqn
        digest = digest_chunk(tensor.detach().cpu(), global_shape=data.size, offsets=data.chunk.offsets)
        shares[key] = shares.get(key, TensorDigest.zero()) + digest
    return shares
