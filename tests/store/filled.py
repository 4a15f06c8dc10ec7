"""Folders of small checkpoints, with digests but without tensors, and what befalls them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.store import layout
from torchtitan_lite.store.layout import Listing
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind, Manifest, seal
from torchtitan_lite.store.store import CheckpointStore

DATA = layout.data_file(0, 0)


def manifest_of(step: int, **fields: Any) -> Manifest:
    """Return the manifest of a full checkpoint of one rank, without files; `fields` as of `Manifest`."""
    common = {"kind": CheckpointKind.FULL, "created_at": 1.0, "world_size": 1, "versions": {}, "files": {}}
    return Manifest(step=step, **{**common, **fields})


def write(staging: Path, data: bytes = b"data", metadata: bytes = b"of dcp") -> None:
    """Write into `staging` what DCP does, with `data` in the file of rank 0."""
    (staging / DATA).write_bytes(data)
    (staging / layout.METADATA).write_bytes(metadata)


def staged(store: CheckpointStore, step: int, data: bytes = b"data", metadata: bytes = b"of dcp") -> Path:
    """Begin a save of `step` and write its files, as `write` does; return its folder."""
    folder = begun(store, step)
    write(folder, data, metadata)
    return folder


def commit(
    store: CheckpointStore, step: int, data: bytes = b"data", metadata: bytes = b"of dcp", **fields: Any
) -> CheckpointInfo:
    """Commit a checkpoint with `data` in the file of rank 0; `fields` as of `Manifest`."""
    place = staged(store, step, data, metadata).name
    return store.commit(step, manifest_of(step, **{"files": {DATA: FileRecord(len(data))}, **fields}), place=place)


def begun(store: CheckpointStore, step: int) -> Path:
    """Begin a save of `step`; return its folder."""
    return store.root / store.begin(step)


def remove_begun(store: CheckpointStore, step: int) -> None:
    """Remove what saves of `step` have begun, as the coordinator does after each one that failed."""
    for name in Listing(store.root).names:
        if layout.parse_staging(name) == step:
            store.remove_staging(step, name)


def without_token(text: str) -> str:
    """Return `text` without what makes the names of staging folders unique."""
    return re.sub(r"(?<=\.staging)-[0-9a-z]+", "", text)


def save(
    store: CheckpointStore,
    step: int,
    *,
    kind: CheckpointKind = CheckpointKind.FULL,
    run_id: str = "a1",
    abandons: Sequence[tuple[int, str]] = (),
    ancestors: Sequence[tuple[int, str]] = (),
    metrics: Mapping[str, float] | None = None,
    created_at: float = 1.0,
    num_bytes: int = 100,
) -> CheckpointInfo:
    """Commit a checkpoint of `num_bytes` in the file of rank 0."""
    data = f"step {step} of {run_id} ".encode().ljust(num_bytes, b".")
    return commit(
        store,
        step,
        data,
        kind=kind,
        created_at=created_at,
        files={DATA: FileRecord.of(data)},
        lineage=Lineage(run_id, abandons=tuple(abandons), ancestors=tuple(ancestors)),
        extra={"metrics": dict(metrics)} if metrics else {},
    )


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
    """Return the names in `root`, without the tokens of staging folders."""
    return sorted(without_token(path.name) for path in root.iterdir())


def foreign(root: Path) -> None:
    """Put into `root` what is not a checkpoint."""
    (root / "notes").mkdir(parents=True)
    (root / "step-007").mkdir()
    (root / "step-5").mkdir()
    (root / "notes" / "a.txt").write_bytes(b"theirs")


def half_written(root: Path) -> None:
    """Put into `root` what a save that was killed leaves."""
    staging = root / layout.staging_dir(30, "0f3a")
    staging.mkdir(parents=True)
    (staging / DATA).write_bytes(b"half")


def of_torchtitan(root: Path) -> None:
    """Put into `root` two checkpoints as plain DCP and torchtitan write them: without a manifest."""
    for step in (10, 20):
        folder = root / layout.step_dir(step)
        folder.mkdir(parents=True)
        (folder / layout.METADATA).write_bytes(b"of dcp")
        (folder / DATA).write_bytes(b"tensors")


def of_a_newer_version(root: Path) -> None:
    """Put into `root` a checkpoint of a later format."""
    path = save(CheckpointStore(root), 10).path / layout.MANIFEST
    path.write_bytes(later_format(path.read_bytes()))


def later_format(text: bytes) -> bytes:
    """Return the manifest `text` as one of a later format, which this version cannot read."""
    fields = b'"format_version": %d,\n"oldest_reader": %d'
    assert fields % (7, 7) in text
    return seal(text.rpartition(b',\n"digest"')[0].replace(fields % (7, 7), fields % (99, 99)))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest in `folder` and seal it correctly, with each field on a line as the package writes it."""
    document = json.loads((folder / layout.MANIFEST).read_bytes())
    del document["digest"]
    change(document)
    fields = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in document.items())
    (folder / layout.MANIFEST).write_bytes(seal(b"{\n" + fields.encode()))


def damage(root: Path, step: int, name: str = DATA) -> None:
    """Flip one byte of a file of `step`."""
    flip(root / layout.step_dir(step) / name)


def flip(path: Path, at: int | None = None) -> None:
    """Flip one bit of the byte `at` of the file at `path`, or of the one in its middle."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        place = file.seek((size // 2 if at is None else at) % size)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
