"""A card of an image, for tests to change with `dataclasses.replace`."""

from __future__ import annotations

from torchtitan_lite.checkpoint.images.card import Card
from torchtitan_lite.checkpoint.images.commits import Commit
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import Table

CARD = Card(
    rank=1,
    world_size=2,
    step=7,
    start="a1",
    folder_id="f1",
    lineage=Lineage("r1", parent_step=5),
    latest=Commit(5, "0" * 32),
    created_at=1.5,
    trained_seconds=3.5,
    topology="2 ranks",
    versions={"torch": "2.13"},
    config={"training": {"steps": 10}},
    file="__1_0.distcp",
    record=FileRecord.of(b"abc"),
    objects=Table({"train_state.step": {"value": 7}}),
    tensors=Table({"model.a": {"dtype": "float32", "shape": [1], "chunks": []}}),
    structure=Table({"root": {}}),
)
