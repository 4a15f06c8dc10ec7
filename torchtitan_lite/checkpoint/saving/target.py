"""What a save makes: the checkpoint that it creates, and what each rank has for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtitan_lite.checkpoint.format.description import PlacedObject
from torchtitan_lite.checkpoint.planning.rank_file import RankPlan
from torchtitan_lite.checkpoint.schedule.interval import NOTHING_AT_RISK, AtRisk
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.config.sections.checkpoint import DcpMetadata
from torchtitan_lite.disk.block_writer import NewFile
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointKind
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
    never_finite: Sequence[str] | None = None
    """`CheckpointInfo.never_finite` of what was loaded; None if nothing with an optimizer was. Not in the manifest."""
    start: str = ""
    """The id of this start of the job, with which images in memory are compared; empty if it keeps none."""
    memory_step: int = -1
    """The step of the image in memory that this start resumed from; -1 if it loaded from disk, or nothing."""
    trained_seconds: float = 0.0
    """That the run had trained, in all its starts, when the state was made."""
    at_risk: AtRisk = NOTHING_AT_RISK
    """What the disk lacked then. Not in the manifest."""


def build_origin(config: JobConfig, lineage: Lineage, topology: str) -> Origin:
    """Return what manifests record of the run of `config`, before it has loaded."""
    section = config.checkpoint
    return Origin(
        lineage,
        topology,
        config.to_dict(),
        tensor_digests="save" in section.digest_tensors,
        dcp_metadata=section.dcp_metadata,
    )


def free() -> None:
    """Do nothing: no check, nothing to wait for."""


@dataclass
class Found:
    """What is found out about a save on its way, on the coordinator."""

    place: str = ""
    """The name of its place, before any rank writes there."""
    slowest: tuple[int | None, float | None] = None, None
    """The rank that took longest to write its file, and its seconds, before the commit."""


@dataclass(frozen=True)
class SaveTarget:
    """The checkpoint that a save creates."""

    store: StoresCheckpoints
    step: int
    kind: CheckpointKind
    origin: Origin
    check: Callable[[], None] = free
    """Raises if the save cannot succeed; called before planning. Acts on the coordinator only."""
    writes_anyway: bool = False
    """Whether the checkpoint is written although ranks hold different values under one name: no save follows."""
    ranks_differ: Sequence[str] = ()
    """Where ranks were found to differ that were equal before: the manifest says so."""
    found: Found = field(default_factory=Found)


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
