"""A card of an image, for tests to change."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.reading.source import LoadSource
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.memory.images.card import Card, CardRun, CardTables, Commit, ImageKey
from torchtitan_lite.memory.images.snapshot_match import ImageFacts
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import Table

CARD = Card(
    key=ImageKey(7, "a1", 0),
    rank=1,
    world_size=2,
    run=CardRun(
        folder_id="f1",
        lineage=Lineage("r1", parent_step=5),
        trained_seconds=3.5,
        topology="2 ranks",
        versions={"torch": "2.13"},
        config={"training": {"steps": 10}},
    ),
    commits=(Commit(5, "0" * 32),),
    created_at=1.5,
    file="__1_0.distcp",
    record=FileRecord.of(b"abc"),
    tables=CardTables(
        objects=Table({"train_state.step": {"value": 7}}),
        tensors=Table({"model.a": {"dtype": "float32", "shape": [1], "chunks": []}}),
        structure=Table({"root": {}}),
    ),
)


def changed(card: Card, **changes: Any) -> Card:
    """Return `card` with the fields `changes`, each of it or of a part of it."""

    def taken(part: object) -> dict[str, Any]:
        return {name: changes.pop(name) for name in [*changes] if hasattr(part, name)}

    key, tables = card.key._replace(**taken(card.key)), card.tables._replace(**taken(card.tables))
    run = dataclasses.replace(card.run, **taken(card.run))
    return dataclasses.replace(card, key=key, run=run, tables=tables, **changes)


def a_source(step: int, lineage: Lineage, *, is_explicit: bool = False) -> LoadSource:
    """Return the checkpoint of `step` on disk, as a load chooses it for the run of `lineage`."""
    return LoadSource(Path(f"step-{step}"), step, model_only=False, lineage=lineage, is_explicit=is_explicit)


def changed_facts(image: ImageFacts, **changes: Any) -> ImageFacts:
    """Return `image` with `changes`, a step among them or not."""
    key = image.key._replace(step=changes.pop("step", image.key.step))
    return dataclasses.replace(image, key=key, **changes)
