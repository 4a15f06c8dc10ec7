"""Paths of keys through their containers are those that a walk through the structure gives, and as strictly checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.format.nests import nests
from torchtitan_lite.checkpoint.format.contents import key_paths
from torchtitan_lite.checkpoint.format.flattening import flatten
from torchtitan_lite.checkpoint.format.structure import branch_of, paths_of


def flat_of(state: Mapping[str, Any]) -> tuple[set[str], set[str], Any]:
    flat, structure = flatten(state)
    tensors = {key for key, value in flat.items() if isinstance(value, torch.Tensor)}
    return tensors, flat.keys() - tensors, structure


@given(nests())
def test_paths_are_those_of_a_walk(state: dict[Any, Any]) -> None:
    tensors, objects, structure = flat_of(state)
    expected = paths_of(structure)
    found = key_paths(structure, tensors, objects)
    assert dict(found) == expected
    assert [[type(step) for step in path] for path in found.values()] == [
        [type(step) for step in path] for path in expected.values()
    ]
    assert (list(found), len(found)) == (list(expected), len(expected))


@given(nests(), st.data())
def test_keys_that_are_missing_unexpected_or_twice_are_refused(state: dict[Any, Any], data: st.DataObject) -> None:
    tensors, objects, structure = flat_of(state)
    keys = sorted(tensors | objects)
    change = data.draw(st.sampled_from(["lose", "add", "rename", "both"] if keys else ["add"]))
    key = data.draw(st.sampled_from(keys)) if keys else ""
    if change in ("lose", "rename"):
        tensors, objects = tensors - {key}, objects - {key}
    if change in ("add", "rename"):
        tensors = tensors | {key[::-1] + "!"}
    if change == "both":
        tensors, objects = tensors | {key}, objects | {key}
    with pytest.raises(ValueError, match=r"is not in the tables|exactly once|have the name"):
        key_paths(structure, tensors, objects)


def test_names_longer_than_those_of_the_tables_are_not_made() -> None:
    """A hundred levels of a name of a megabyte would be a hundred megabytes for each of a million keys."""
    inner = branch_of("dict", [f"{n}" for n in range(1000)], [None] * 1000)
    for _ in range(90):
        inner = branch_of("dict", ["x" * 1_000_000], [inner])
    with pytest.raises(ValueError, match="is not in the tables"):
        key_paths(inner, {f"{n}" for n in range(1000)}, set())


def test_two_entries_of_one_name_are_refused() -> None:
    inner = branch_of("dict", ["b"], [None])
    structure = branch_of("dict", ["a", "a.b"], [inner, None])
    with pytest.raises(ValueError, match=r"two entries of the state have the name 'a.b'"):
        key_paths(structure, {"a.b"}, {"c.d"})
