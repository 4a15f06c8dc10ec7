"""Folders of small checkpoints, with digests but without tensors, for tests of the store and of the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind, Manifest
from torchtitan_lite.store.store import CheckpointStore

DATA = layout.data_file(0, 0)


def save(
    store: CheckpointStore,
    step: int,
    *,
    kind: CheckpointKind = CheckpointKind.FULL,
    run_id: str = "a1",
    abandons: Sequence[tuple[int, str]] = (),
    metrics: Mapping[str, float] | None = None,
    created_at: float = 1.0,
    num_bytes: int = 100,
) -> CheckpointInfo:
    """Commit a checkpoint of `num_bytes` in the file of rank 0."""
    store.clear_staging(step)
    staging, data = store.stage(step), f"step {step} of {run_id} ".encode().ljust(num_bytes, b".")
    (staging / DATA).write_bytes(data)
    (staging / layout.METADATA).write_bytes(b"of dcp")
    manifest = Manifest(
        step=step,
        kind=kind,
        created_at=created_at,
        world_size=1,
        versions={},
        files={DATA: FileRecord.of(data)},
        lineage=Lineage(run_id, abandons=tuple(abandons)),
        extra={"metrics": dict(metrics)} if metrics else {},
    )
    return store.commit(step, manifest)


def fill(root: Path, *steps: int) -> CheckpointStore:
    """Return a store in `root` with full checkpoints of `steps`."""
    store = CheckpointStore(root)
    for step in steps:
        save(store, step)
    return store


def contents(root: Path) -> dict[str, bytes]:
    """Return the bytes of every file below `root`, by relative path."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def names(root: Path) -> list[str]:
    """Return the names in `root`."""
    return sorted(path.name for path in root.iterdir())
