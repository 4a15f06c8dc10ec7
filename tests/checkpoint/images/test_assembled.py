"""A manifest from the cards of all ranks: what a save would have written, or a refusal that names what does not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.checkpoint.images.cards import CARD, changed
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.errors import CheckpointDamaged
from torchtitan_lite.memory.images.card import Card, assembled_manifest, same_contents
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointKind, Manifest, Table

FIRST = changed(CARD, rank=0, file="__0_0.distcp", objects=Table({"train_state.n": {"value": 1}}))
SECOND = changed(CARD, tensors=None, structure=None, commits=())


def second(**changes: Any) -> Card:
    return changed(SECOND, **changes)


def test_the_cards_of_all_ranks_are_a_manifest_that_is_read_back() -> None:
    manifest = assembled_manifest([SECOND, FIRST])
    found = Manifest.parse(manifest.to_json())
    assert found.to_json() == manifest.to_json()
    assert (found.step, found.kind, found.world_size, found.lineage) == (7, CheckpointKind.FULL, 2, FIRST.run.lineage)
    assert found.files == {"__0_0.distcp": FIRST.record, "__1_0.distcp": SECOND.record}
    assert dict(found.objects) == {"train_state.n": {"value": 1}, "train_state.step": {"value": 7}}
    assert dict(found.tensors) == dict(CARD.tables.tensors or {})
    assert found.extra == {
        "topology": "2 ranks",
        "config": {"training": {"steps": 10}},
        "start": "a1",
        "trained_seconds": 3.5,
    }


def test_the_objects_of_all_ranks_are_put_together_as_they_were_written() -> None:
    spaced = second(objects=Table.of_text(b' {"a": {"value": "},{"} , "b": {}} ', "card"))
    manifest = Manifest.parse(assembled_manifest([FIRST, spaced]).to_json())
    assert dict(manifest.objects) == {"train_state.n": {"value": 1}, "a": {"value": "},{"}, "b": {}}
    for empty in (Table(), Table.of_text(b" { } ", "card")):
        assert dict(assembled_manifest([FIRST, second(objects=empty)]).objects) == dict(FIRST.tables.objects)
    only = Table.of_text(FIRST.tables.objects.text, "card")
    assert assembled_manifest([changed(FIRST, objects=only), second(objects=Table())]).objects is only
    assert only.unparsed is not None, "a million objects of one rank are not parsed to be copied"


def test_objects_that_are_no_table_are_refused_here_or_when_they_are_read() -> None:
    broken = Table.of_text(b'{"a": 1}', "card")
    with pytest.raises(CheckpointDamaged, match="a: expected dict"):
        assembled_manifest([FIRST, second(objects=broken)])
    manifest = assembled_manifest([changed(FIRST, objects=broken), second(objects=Table())])
    with pytest.raises(CheckpointDamaged, match="a: expected dict"):
        dict(Manifest.parse(manifest.to_json()).objects)


def test_a_rank_without_tensors_has_no_file() -> None:
    assert set(assembled_manifest([FIRST, second(file="", record=FileRecord(0))]).files) == {"__0_0.distcp"}


@pytest.mark.parametrize(
    ("cards", "finding"),
    [
        ([], "no headers"),
        ([FIRST], "ranks 0 to 1, found those of 0"),
        ([FIRST, FIRST], "found those of 0, 0"),
        ([FIRST, second(start="b2")], "start: expected 'a1', found 'b2'"),
        ([FIRST, second(step=8)], "step: expected 7, found 8"),
        ([FIRST, second(folder_id="f2")], "folder_id"),
        ([FIRST, second(topology="other")], "topology"),
        ([FIRST, second(lineage=Lineage("r2"))], "it is of run r2"),
        ([FIRST, second(file="__0_0.distcp")], "is not the name of its file"),
        ([FIRST, second(file="")], "has no name"),
        ([FIRST, second(objects=FIRST.tables.objects)], "'train_state.n' is an object of another rank"),
        ([changed(FIRST, tensors=None), SECOND], "no tables"),
    ],
)
def test_cards_that_do_not_fit_together_are_refused_by_name(cards: list[Card], finding: str) -> None:
    with pytest.raises(ValueError, match=finding):
        assembled_manifest(cards)


def test_contents_are_compared_byte_by_byte_and_metadata_left_out() -> None:
    ours = assembled_manifest([FIRST, SECOND])
    on_disk = dataclasses.replace(ours, files=ours.files | {".metadata": FileRecord(3)}, created_at=9.0)
    assert same_contents(on_disk, ours)
    other = FileRecord.of(b"abd")
    assert not same_contents(dataclasses.replace(on_disk, files=on_disk.files | {"__1_0.distcp": other}), ours)
    assert not same_contents(dataclasses.replace(on_disk, objects=Table({})), ours)
