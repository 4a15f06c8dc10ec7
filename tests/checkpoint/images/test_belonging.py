"""Whose image it is: each line of the rule, on values."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.checkpoint.images.cards import a_source, changed_facts
from torchtitan_lite.memory.images.card import Commit, ImageKey
from torchtitan_lite.memory.images.snapshot_match import ImageFacts, OnDisk, why_not
from torchtitan_lite.store.lineage import Lineage

TEN, TWENTY, FIFTEEN = Commit(10, "a" * 32), Commit(20, "b" * 32), Commit(15, "c" * 32)
IMAGE = ImageFacts(ImageKey(12, "s1", 0), 0, 1, folder_id="f", run_id="r1", branch_point=None, latest=TEN)
LEFT = Lineage("r2", ancestors=((10, "r1"),))
BRANCH = a_source(10, Lineage("new"), is_explicit=True)
DISK = OnDisk(folder_id="f", latest=TEN, latest_start="s0", chosen=a_source(10, Lineage("r1")))
FRESH = OnDisk(folder_id="f")


def image(**changes: Any) -> ImageFacts:
    return changed_facts(IMAGE, **changes)


def disk(before: OnDisk = DISK, **changes: Any) -> OnDisk:
    return dataclasses.replace(before, **changes)


ON_BRANCH = image(run_id="r2", branch_point=10, latest=TWENTY, step=12)
"""Of a run that rolled back to step 10 of a run with a step 20, and has committed nothing yet."""
ROLLS_BACK = disk(latest=TWENTY, wanted=10, chosen=BRANCH, abandoned=frozenset())
OF_BRANCH = Commit(10, "d" * 32, run_id="r2")
BRANCH_COMMITTED = disk(
    latest=FIFTEEN, latest_start="s1", chosen=a_source(15, Lineage("r2")), abandoned=frozenset({20})
)

ROLLED_BACK = disk(
    latest=FIFTEEN,
    latest_start="s1",
    chosen=a_source(10, LEFT),
    abandoned=frozenset(),
)
"""Of a run r2 with which r1, of which a step 15 is there still, rolled back to step 10."""

COUNT = {
    "the commit that it knows is still the latest": (image(), disk()),
    "its start has committed since": (
        image(step=17),
        disk(latest=FIFTEEN, latest_start="s1", chosen=a_source(15, Lineage("r1"))),
    ),
    "the first commit of all was by its start": (image(latest=None, step=17), disk(latest=FIFTEEN, latest_start="s1")),
    "the step was committed by its start and is chosen": (
        image(step=20),
        disk(latest=TWENTY, latest_start="s1", chosen=a_source(20, Lineage("r1"))),
    ),
    "nothing is committed and the folder is the same": (image(latest=None), FRESH),
    "a branch continues that has committed nothing": (ON_BRANCH, ROLLS_BACK),
    "a branch continues whose start has committed": (
        changed_facts(ON_BRANCH, step=17),
        disk(BRANCH_COMMITTED, wanted=10),
    ),
    "a branch continues without its load_step": (changed_facts(ON_BRANCH, step=17), BRANCH_COMMITTED),
    "the disk has only the damaged step of its branch": (
        image(run_id="r2", branch_point=2, step=12, latest=OF_BRANCH),
        disk(latest=OF_BRANCH, chosen=None),
    ),
    "the disk falls back from a damaged step of its branch to the run that it left": (
        image(run_id="r2", branch_point=2, step=12, latest=OF_BRANCH),
        disk(latest=OF_BRANCH, chosen=a_source(2, Lineage("r1"))),
    ),
    "its start has committed a step of its branch, which is damaged": (
        image(run_id="r2", branch_point=2, step=12, latest=Commit(2, "f" * 32, run_id="r1")),
        disk(latest=OF_BRANCH, latest_start="s1", chosen=a_source(2, Lineage("r1"))),
    ),
    "the very step is wanted": (
        image(step=10),
        disk(wanted=10, is_exact=True, chosen=BRANCH),
    ),
    "it is of the step that the user rolls back to": (image(step=10), disk(ROLLS_BACK, latest=TEN)),
    "it is of the branch with which the run rolled back, which has saved nothing": (
        image(run_id="r2", latest=FIFTEEN),
        ROLLED_BACK,
    ),
}

REFUSED = {
    "lease lost: another start has committed": (
        image(),
        disk(latest=TWENTY, latest_start="s2", chosen=a_source(10, Lineage("r1"))),
        "another start",
    ),
    "lease lost: a start has committed where there was nothing": (
        image(latest=None),
        disk(latest_start="s2"),
        "before there was one",
    ),
    "the step has the same number and other contents": (image(latest=Commit(10, "d" * 32)), disk(), "another start"),
    "the folder was made again": (image(latest=None), disk(FRESH, folder_id="g"), "another folder"),
    "the folder was made again by something else": (image(latest=None), disk(FRESH, folder_id=""), "another folder"),
    "all steps were deleted": (image(), FRESH, "which is gone"),
    "its own start's last step was deleted": (
        image(latest=TWENTY, step=22),
        disk(latest_start="s1"),
        "another start",
    ),
    "the disk is further": (image(step=9), disk(), "step 10 is on disk"),
    "it is of another run": (image(run_id="r9"), disk(), "run r1 is resumed"),
    "a branch that committed nothing does not win over its run": (
        ON_BRANCH,
        disk(latest=TWENTY, chosen=a_source(20, Lineage("r1"))),
        "step 20 is on disk",
    ),
    "nor when it is further": (
        changed_facts(ON_BRANCH, step=25),
        disk(latest=TWENTY, chosen=a_source(20, Lineage("r1"))),
        "run r1 is resumed",
    ),
    "the user rolls back further": (
        image(step=22, latest=TWENTY),
        ROLLS_BACK,
        "no branch from step 10",
    ),
    "a branch from another step": (
        changed_facts(ON_BRANCH, branch_point=5),
        ROLLS_BACK,
        "no branch from step 10",
    ),
    "a new branch is wanted": (ON_BRANCH, disk(ROLLS_BACK, new_branch=True), "a new branch"),
    "another step is wanted": (
        image(),
        disk(wanted=10, is_exact=True, chosen=BRANCH),
        "step 10 is wanted",
    ),
    "the run counts again": (
        image(),
        disk(chosen=a_source(10, Lineage("r1", counts_again=True))),
        "counts its steps",
    ),
    "it is of a step that the run left when it rolled back": (
        image(latest=FIFTEEN, step=17),
        ROLLED_BACK,
        "the run rolled back to step 10",
    ),
    "nor once the branch has a checkpoint of its own": (
        image(latest=TEN, step=17),
        disk(latest=TEN, latest_start="s1", chosen=a_source(12, LEFT)),
        "the run rolled back to step 10",
    ),
    "a branch without anything on disk": (image(latest=None, branch_point=3), FRESH, "a branch from step 3"),
}


@pytest.mark.parametrize("case", COUNT)
def test_an_image_counts_where(case: str) -> None:
    assert why_not(*COUNT[case]) == ""


@pytest.mark.parametrize("case", REFUSED)
def test_an_image_does_not_count_where(case: str) -> None:
    found, there, finding = REFUSED[case]
    assert finding in why_not(found, there)
