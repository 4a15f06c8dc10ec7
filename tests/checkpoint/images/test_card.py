"""The limits of a card: the smallest and the largest values that it may have, and what is refused beyond them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.checkpoint.images.cards import CARD, changed
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.errors import FormatTooOld
from torchtitan_lite.memory.images.card import Card, Commit
from torchtitan_lite.store.manifest import Table


def card(**changes: Any) -> Card:
    return changed(CARD, tensors=None, structure=None, objects=Table({}), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 0, "world_size": 1, "step": 0, "file": "", "record": FileRecord(0)},
        {"commits": (Commit(0, ""),)},
        {"commits": ()},
        {"commits": (*(Commit(step, "d", step) for step in range(4)), Commit(5, "d", 1 << 62, "r1"))},
        {"start": "s" * 64, "folder_id": "", "commits": (Commit(5, "d" * 64),)},
        {"versions": {}, "config": {"a": {"b": [1, None, "é"]}}, "topology": "", "created_at": 0.0},
        {"record": FileRecord.of(bytes((2 << 20) + 1))},
    ],
)
def test_a_card_at_its_limits_is_read_as_it_was_written(changes: dict[str, Any]) -> None:
    found = Card.parse(card(**changes).to_bytes())
    assert changed(found, objects=Table({})) == changed(card(**changes), objects=found.tables.objects)
    for commit, again in zip(card(**changes).commits, found.commits, strict=True):
        assert dataclasses.astuple(again) == dataclasses.astuple(commit)


def test_a_card_from_before_the_first_release_is_named_as_such() -> None:
    data = CARD.to_bytes().replace(b'"format_version":7,"oldest_reader":7,', b"")
    assert b"format_version" not in data
    with pytest.raises(FormatTooOld, match="an in-memory snapshot has format version 1, from before the first release"):
        Card.parse(data)


def test_a_field_that_a_later_version_added_to_a_card_is_ignored_and_kept() -> None:
    later = CARD.to_bytes().replace(b'"format_version":7,', b'"format_version":8,"mood":"good",')
    found = Card.parse(later)
    assert dataclasses.replace(found, unknown={}) == Card.parse(CARD.to_bytes())
    assert Card.parse(changed(found, step=0).to_bytes()).unknown == found.unknown
    assert found.unknown == {"format_version": 8, "oldest_reader": 7, "mood": "good"}


def test_a_number_that_is_none_is_neither_written_nor_read() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        card(config={"lr": float("nan")}).to_bytes()
    data = card(config={"lr": 0.5}).to_bytes()
    for constant in (b"NaN", b"Infinity", b"-Infinity"):
        with pytest.raises(ValueError, match=constant.decode()):
            Card.parse(data.replace(b"0.5", constant))


@pytest.mark.parametrize(
    ("before", "after", "finding"),
    [
        (b'"size":3', b'"size":-1', "size: expected at least 0"),
        (b'"world_size":2', b'"world_size":0', "world_size: expected at least 1"),
        (b'"rank":1', b'"rank":-1', "rank: expected at least 0"),
        (b'"rank":1', b'"rank":3', "expected a rank below 2, found 3"),
        (b'"latest":{"step":5', b'"latest":{"step":-1', "step: expected at least 0"),
        (b'"latest":{"step":5', b'"latest":{"step":"5"', "step: expected int"),
        (b'"written_ns":0', b'"written_ns":-1', "written_ns: expected at least 0"),
        (b'"before":[]', b'"before":{}', "before: expected list"),
        (b'"before":[]', b'"before":[7]', "commit"),
        (b'"start":"a1"', b'"start":"' + b"s" * 65 + b'"', "start: expected at most 64 letters"),
        (b'"start":"a1"', b'"start":"\\u00e9"', "start: expected at most 64 letters"),
        (b'"folder_id":"f1"', b'"folder_id":null', "folder_id: expected str"),
        (b'"torch":"2.13"', b'"torch":2', "torch: expected str"),
        (b'"trained_seconds":3.5', b'"trained_seconds":1e999', "trained_seconds: expected seconds"),
        (b'"created_at":1.5', b'"created_at":"now"', "created_at: expected float"),
    ],
)
def test_what_is_beyond_a_limit_is_refused_by_name(before: bytes, after: bytes, finding: str) -> None:
    data = CARD.to_bytes()
    assert before in data
    with pytest.raises(ValueError, match=finding):
        Card.parse(data.replace(before, after))


@pytest.mark.parametrize("first", [b"[]", b"7", b'"a"', b"null"])
def test_a_card_that_begins_with_no_object_is_refused(first: bytes) -> None:
    with pytest.raises(ValueError, match="its first line is not a JSON object"):
        Card.parse(first + b"\n{}\n\n")
