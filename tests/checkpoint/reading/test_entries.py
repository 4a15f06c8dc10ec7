"""Which keys of a checkpoint belong to which entry of a state."""

from __future__ import annotations

import pytest

from torchtitan_lite.checkpoint.format.contents import Contents, StoredObject
from torchtitan_lite.checkpoint.reading.entries import Leaf, entries


def contents(**paths: tuple[str | int, ...] | None) -> Contents:
    """Return a checkpoint with an object under each key, and with the path of each key that has one."""
    objects = {key.replace("__", "."): StoredObject(1) for key in paths}
    known = {key.replace("__", "."): path for key, path in paths.items() if path is not None}
    return Contents("step-4", {}, objects, known)


def test_a_key_below_the_prefix_belongs_to_the_entry_that_its_path_names() -> None:
    found = entries(contents(optimizer__a__b=("optimizer", "a", "b"), optimizer__c=("optimizer", "c")), "optimizer.")
    assert found == {"a": [Leaf("optimizer.a.b", ("b",))], "c": [Leaf("optimizer.c", ())]}


def test_without_a_prefix_the_first_step_of_the_path_names_the_entry() -> None:
    assert entries(contents(a__b=("a", "b"), c=("c",)), "") == {"a": [Leaf("a.b", ("b",))], "c": [Leaf("c", ())]}


@pytest.mark.parametrize("prefix", ["", "optimizer."])
def test_a_key_without_a_path_is_an_entry_under_its_own_name(prefix: str) -> None:
    assert entries(contents(optimizer__a__b=None), prefix) == {
        "optimizer.a.b".removeprefix(prefix): [Leaf("optimizer.a.b", ())]
    }


def test_a_path_that_ends_at_the_prefix_or_leads_elsewhere_names_no_entry() -> None:
    found = entries(contents(optimizer__a=("optimizer",), optimizer__b=("model", "b")), "optimizer.")
    assert found == {"a": [Leaf("optimizer.a", ())], "b": [Leaf("optimizer.b", ())]}


def test_keys_of_other_prefixes_are_left_out() -> None:
    assert entries(contents(model__a=("model", "a")), "optimizer.") == {}
