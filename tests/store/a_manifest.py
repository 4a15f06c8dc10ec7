"""A manifest, and how others are sealed."""

import json
from typing import Any

from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.store.manifest import CheckpointKind, Manifest, Table, seal

MANIFEST = Manifest(
    step=500,
    kind=CheckpointKind.FULL,
    created_at=1700000000.25,
    world_size=2,
    versions={"torch": "2.13.0"},
    files={"__0_0.distcp": FileRecord(10), "__1_0.distcp": FileRecord(20)},
    tensors=Table({"w": {"dtype": "float32", "shape": [2], "chunks": [["__0_0.distcp", 0, [0], [2]]]}}),
    objects=Table({"n": {"value": 3}}),
    structure=Table({"root": {"kind": "dict", "keys": ["w", "n"]}}),
    extra={"run_id": "r1", "mesh": [2, 1]},
)


def sealed(document: dict[str, Any]) -> bytes:
    """Return `document` as JSON with the right digest in its last line."""
    fields = {name: value for name, value in document.items() if name != "digest"}
    return seal(json.dumps(fields).removesuffix("}").encode())
