"""Whose image it is, where two of the rule's lines meet, and what the rule is given of a card."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.checkpoint.images.cards import CARD, a_source, changed, changed_facts
from torchtitan_lite.memory.images.card import Commit, ImageKey
from torchtitan_lite.memory.images.snapshot_match import ImageFacts, OnDisk, why_not
from torchtitan_lite.store.lineage import Lineage

TEN, TWENTY, THIRTY = Commit(10, "a" * 32), Commit(20, "b" * 32), Commit(30, "c" * 32)
IMAGE = ImageFacts(ImageKey(20, "s1", 0), 0, 1, folder_id="f", run_id="r1", branch_point=None, latest=TEN)
DISK = OnDisk(folder_id="f", latest=TWENTY, latest_start="s1", chosen=a_source(20, Lineage("r1")))


def finding(image: dict[str, Any], disk: dict[str, Any]) -> str:
    return why_not(changed_facts(IMAGE, **image), dataclasses.replace(DISK, **disk))


def test_the_step_on_disk_is_that_of_the_image_only_if_its_start_committed_it() -> None:
    later = {"latest": THIRTY}  # It knew a later step, which was deleted.
    assert finding(later, {}) == ""
    assert "is of another start" in finding(later, {"latest_start": "s2"})
    assert "is of another start" in finding({**later, "step": 21}, {})


@pytest.mark.parametrize(("known", "counts"), [(None, True), (TEN, True), (TWENTY, True), (Commit(20, "d"), False)])
def test_a_commit_of_the_same_start_counts_after_what_the_image_knew(known: Commit | None, counts: bool) -> None:
    assert (finding({"latest": known, "step": 25}, {}) == "") == counts


KNOWN = Commit(30, "d" * 32, 7)
LEFT = {"latest": TWENTY, "latest_start": "s0", "rests": frozenset({Commit(30, "", 7)})}
"""The disk after the manifest of the step that the image knows was damaged."""


@pytest.mark.parametrize(
    ("image", "disk", "expected"),
    [
        ({}, {}, ""),
        ({}, {"rests": frozenset({Commit(30, "d" * 32, 8)})}, ""),  # Its manifest is intact, its .metadata is not.
        ({}, {"latest": TEN}, ""),  # Two steps are damaged.
        ({}, {"latest": None, "chosen": None}, ""),
        ({}, {"rests": frozenset()}, "another start"),  # It was deleted.
        ({}, {"rests": frozenset({Commit(30, "", 8)})}, "another start"),  # Another one took its place.
        ({}, {"rests": frozenset({Commit(30, "e" * 32, 8)})}, "another start"),
        ({}, {"rests": frozenset({Commit(30, "", 0)})}, "another start"),
        ({}, {"rests": frozenset({Commit(29, "d" * 32, 7)})}, "another start"),
        ({"latest": Commit(30, "")}, {"rests": frozenset({Commit(30, "")})}, "another start"),  # Nothing is known.
        ({}, {"latest": Commit(20, "x")}, "another start"),  # It was committed after the damage.
        ({}, {"latest": Commit(25, "x")}, "another start"),
        ({"before": ()}, {}, "another start"),
        ({"step": 19}, {}, "step 20 is on disk"),
        ({"run_id": "r9"}, {}, "run r1 is resumed"),
        ({}, {"latest": None, "chosen": None, "folder_id": "g"}, "another folder"),
        ({}, {"latest": None, "chosen": None, "rests": frozenset()}, "step 30, which is gone"),
    ],
)
def test_next_to_a_damaged_step_an_image_counts_if_that_is_the_one_that_it_knows_and_nothing_came_after_it(
    image: dict[str, Any], disk: dict[str, Any], expected: str
) -> None:
    found = finding({"step": 32, "latest": KNOWN, "before": (TEN, TWENTY), **image}, {**LEFT, **disk})
    assert expected in found and bool(found) == bool(expected)


def test_a_new_branch_needs_the_step_where_it_begins() -> None:
    beyond = {"step": 25, "latest": TWENTY}
    assert finding(beyond, {"new_branch": True}) == ""
    for step in (0, 1, 2, 20):
        assert finding(beyond, {"new_branch": True, "wanted": step}) == "a new branch is wanted"


AGAIN = {"chosen": a_source(20, Lineage("new", branch_point=3, counts_again=True))}


@pytest.mark.parametrize(
    ("image", "disk", "expected"),
    [
        ({"counts_again": True, "branch_point": 3, "step": 2}, {}, ""),
        ({"counts_again": True, "branch_point": 4, "step": 2}, {}, "it is of another branch that counts"),
        ({"counts_again": True, "branch_point": None, "step": 2}, {}, "it is of another branch that counts"),
        ({"counts_again": True, "branch_point": 3, "step": 2}, {"new_branch": True}, "a new branch is wanted"),
        ({"counts_again": False, "branch_point": 3, "step": 29}, {}, "the run counts its steps from the start again"),
    ],
)
def test_an_image_of_a_run_that_counts_again_continues_whatever_its_step(
    image: dict[str, Any], disk: dict[str, Any], expected: str
) -> None:
    found = finding(image, {**AGAIN, **disk})
    assert found.startswith(expected) and bool(found) == bool(expected)


def test_a_wanted_step_that_is_not_on_disk_is_not_in_memory_either() -> None:
    assert finding({}, {"is_exact": True, "wanted": 20, "chosen": None}) == "step 20 is wanted"
    assert finding({}, {"is_exact": True, "wanted": 20}) == ""


@pytest.mark.parametrize(
    ("config", "counts_again"),
    [
        ({}, False),
        ({"checkpoint": None}, False),
        ({"checkpoint": {}}, False),
        ({"checkpoint": {"exclude_from_loading": "train_state"}}, False),
        ({"checkpoint": {"exclude_from_loading": ["optimizer"]}}, False),
        ({"checkpoint": {"exclude_from_loading": ["optimizer", "train_state"]}}, True),
    ],
)
def test_the_rule_gets_all_that_it_needs_of_a_card(config: dict[str, Any], counts_again: bool) -> None:
    commits = (Commit(2, "2" * 32), *CARD.commits)
    card = changed(CARD, commits=commits, config=config, lineage=Lineage("r1", branch_point=4))
    assert ImageFacts.of_card(card) == ImageFacts(
        ImageKey(7, "a1", 0),
        rank=1,
        world_size=2,
        folder_id="f1",
        run_id="r1",
        branch_point=4,
        latest=Commit(5, "0" * 32),
        before=(Commit(2, "2" * 32),),
        topology="2 ranks",
        counts_again=counts_again,
    )
