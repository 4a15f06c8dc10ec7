"""The containers of a state: flattened, rebuilt, joined over ranks, and decoded from a document that may be hostile."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from tests.checkpoint.format.nests import nests
from tests.checkpoint.with_manifest import write_manifest
from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.checkpoint.format.flattening import difference, flat_tensors, flatten
from torchtitan_lite.checkpoint.format.structure import (
    MAX_DEPTH,
    Branch,
    Containers,
    decode_structure,
    encode_structure,
    merged_structure,
    paths_of,
    rebuild,
)
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.errors import CheckpointDamaged
from torchtitan_lite.store.manifest import seal


def through_json(structure: Branch) -> Branch:
    return decode_structure(json.loads(json.dumps(encode_structure(structure), allow_nan=False)))


@settings(max_examples=100)
@given(nests())
def test_a_state_is_rebuilt_from_its_entries_and_its_structure(state: Any) -> None:
    flat, structure = flatten(state)
    again = through_json(structure)
    assert again == structure
    found = rebuild(again, flat)
    assert difference(state, found) == ""
    again_flat, _ = flatten(found)
    assert list(again_flat) == list(flat)
    assert all(again_flat[name] is flat[name] for name in flat)


@settings(max_examples=100)
@given(nests())
def test_names_and_paths_are_dcps(state: Any) -> None:
    flat, structure = flatten({"s": state})
    expected, paths = flatten_state_dict({"s": state})
    assert list(flat) == list(expected)
    assert all(flat[name] is expected[name] for name in flat)
    assert paths_of(structure) == paths


def nested(depth: int) -> Any:
    state: Any = 0
    for _ in range(depth):
        state = {"in": state}
    return state


def test_a_state_may_be_as_deep_as_a_load_can_read() -> None:
    deepest = nested(MAX_DEPTH)
    flat, structure = flatten(deepest)
    assert rebuild(through_json(structure), flat) == deepest
    with pytest.raises(ValueError, match="nested more than"):
        flatten(nested(MAX_DEPTH + 1))


def test_half_a_pair_of_surrogates_is_refused_as_a_key() -> None:
    with pytest.raises(TypeError, match="would not come back"):
        flatten({"a": {"\ud800": 0}})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({1: 0}, {"1": 0}),
        ({1: 0}, {True: 0}),
        ({1: 0}, {1.0: 0}),
        ({0.0: 0}, {-0.0: 0}),
        ({(1,): 0}, {(True,): 0}),
        ({"a": {}}, {}),
        ({"a": {}}, {"a": [{}]}),
        ({"a": [{}]}, {"a": [{}, {}]}),
        ({"a": 0, "b": 0}, {"b": 0, "a": 0}),
    ],
    ids=repr,
)
def test_states_with_different_keys_or_containers_have_different_structures(one: Any, other: Any) -> None:
    assert flatten(one)[1] != flatten(other)[1]
    assert through_json(flatten(one)[1]) != through_json(flatten(other)[1])


def test_a_container_is_found_by_its_name() -> None:
    structure = flatten({"rng": {"rank0": {"a": 1}, "rank1": {"b": 1}}, "rng.rank2": {"c": 1}, "x": {3: {}}, "y": 1})[1]
    find = Containers(structure).find
    keys = {name: list(branch.keys) for name in ("rng.rank1", "rng.rank2", "x.3", "x") if (branch := find(name))}
    assert keys == {"rng.rank1": ["b"], "rng.rank2": ["c"], "x.3": [], "x": [3]}
    assert [find(name) for name in ("y", "rng.rank", "rng.rank0.a", "", "x.", "x.4")] == [None] * 6


def test_finding_a_container_makes_no_names_of_all_others() -> None:
    long = "k" * 100_000
    structure = flatten({long: {str(number): {} for number in range(5_000)}})[1]
    tracemalloc.start()
    try:
        assert Containers(structure).find(f"{long}.4999") == structure.children[0].children[4999]  # type: ignore[union-attr]
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


NODE = {"kind": "dict", "keys": ["a"]}


def deep(levels: int) -> dict[str, Any]:
    document: dict[str, Any] = {"kind": "dict", "keys": []}
    for _ in range(levels - 1):
        document = {"kind": "list", "children": [document]}
    return document


@pytest.mark.parametrize(
    "document",
    [
        *(None, 1, "dict", [], {}, {"kind": None}, {"kind": ["dict"]}, {"kind": {}}),
        *(
            {"kind": "set", "keys": []},
            {"kind": "os.system", "keys": ["touch x"]},
            {"kind": "defaultdict(eval)", "keys": []},
        ),
        *({"kind": "dict"}, {"kind": "dict", "keys": {}}, {"kind": "dict", "keys": "ab"}, {"kind": "list"}),
        *({"kind": "dict", "keys": ["a"], "children": []}, {"kind": "dict", "keys": ["a"], "children": [1]}),
        *({"kind": "dict", "keys": ["a", "a"]}, {"kind": "dict", "keys": [1, True]}, {"kind": "dict", "keys": [[1]]}),
        *({"kind": "dict", "keys": [{"$tuple": [[1]]}]}, {"kind": "dict", "keys": [{"$eval": "1"}]}),
        *({"kind": "dict", "keys": [{"$int": "f" * 20_000}]}, {"kind": "dict", "keys": [{"a": 1}]}),
        *({"kind": "list", "children": {}}, {"kind": "list", "children": [[NODE]]}, deep(MAX_DEPTH + 1), deep(150)),
    ],
    ids=lambda document: repr(document)[:60],
)
def test_a_document_that_is_not_a_structure_is_refused(document: Any) -> None:
    with pytest.raises(ValueError):
        decode_structure(document)
    with pytest.raises(ValueError):
        decode_structure(
            {"kind": "dict", "keys": ["x"], "children": [document]}
        ) if document is not None else decode_structure(None)


def test_the_deepest_structure_is_accepted() -> None:
    assert encode_structure(decode_structure(deep(MAX_DEPTH))) == deep(MAX_DEPTH) | {
        "children": deep(MAX_DEPTH)["children"]
    }


def contents_of(folder: Path, structure: Any, objects: dict[str, Any]) -> Contents:
    manifest = write_manifest(folder, {}, {}, objects, structure)
    return Contents.of_manifest(manifest, str(folder))


VALUE = {"value": 1}


@pytest.mark.parametrize(
    ("structure", "objects"),
    [
        ({"kind": "dict", "keys": ["a"]}, {}),
        ({"kind": "dict", "keys": []}, {"a": VALUE}),
        ({"kind": "dict", "keys": ["a", "b"]}, {"a": VALUE}),
        ({"kind": "dict", "keys": ["a"]}, {"a": VALUE, "b": VALUE}),
        ({"kind": "dict", "keys": ["a.b", "a"], "children": [None, {"kind": "dict", "keys": ["b"]}]}, {"a.b": VALUE}),
        ({"kind": "dict", "keys": [1, "1"]}, {"1": VALUE}),
        ([], {"a": VALUE}),
        ("dict", {"a": VALUE}),
    ],
    ids=repr,
)
def test_a_structure_that_does_not_fit_the_tables_is_damage(tmp_path: Path, structure: Any, objects: Any) -> None:
    with pytest.raises(CheckpointDamaged, match=r"manifest.json: the structure of the state: ") as caught:
        contents_of(tmp_path, structure, objects)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "root",
    ["[]", "3", '{"kind": "dict"}', '{"kind": "list", "children": [' * 3000 + "]}" * 3000, '{"kind": NaN}'],
    ids=lambda text: text[:20],
)
def test_an_impossible_structure_on_disk_is_damage_to_the_manifest(tmp_path: Path, root: str) -> None:
    write_manifest(tmp_path, {}, {}, {"a": VALUE}, {"kind": "dict", "keys": ["a"]})
    path = tmp_path / "manifest.json"
    line = '"structure": {"root":'
    lines = [f"{line}{root}}}," if text.startswith(line) else text for text in path.read_text().splitlines()]
    path.write_bytes(seal("\n".join(lines[:-2]).removesuffix(",").encode()))
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json"):
        _ = CheckpointFolder(tmp_path).contents


def test_a_long_key_above_many_entries_does_not_multiply_memory(tmp_path: Path) -> None:
    """With a key of a megabyte, the names of tens of thousands of entries below it would take gigabytes."""
    leaves: dict[str, Any] = {"kind": "dict", "keys": [f"k{number}" for number in range(20_000)]}
    hollow = {"kind": "list", "children": [{"kind": "dict", "keys": []}] * 20_000}
    for inner in leaves, hollow:
        tracemalloc.start()
        with pytest.raises(CheckpointDamaged):
            contents_of(tmp_path, {"kind": "dict", "keys": ["x" * 1_000_000], "children": [inner]}, {"a": VALUE})
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
        tracemalloc.stop()


def test_the_different_parts_of_ranks_are_joined() -> None:
    first = {"model": {"a": 1}, "s": {1: {"x": 1}}, "rng": {"rank0": {"t": 1}}, "list": [{"x": 1}], "e": {}}
    second = {
        "model": {"b": 2},
        "s": {1: {"y": 2}, "1": {}},
        "rng": {"rank1": {"t": 2}},
        "list": [{}, {"y": 1}],
        "e": {},
    }
    together, odd = merged_structure(flatten(state)[1] for state in (first, second, first))
    flat = flatten(first)[0] | flatten(second)[0]
    assert rebuild(through_json(together), flat) == {
        "model": {"a": 1, "b": 2},
        "s": {1: {"x": 1, "y": 2}, "1": {}},
        "rng": {"rank0": {"t": 1}, "rank1": {"t": 2}},
        "list": [{"x": 1}],
        "e": {},
    }
    assert odd == {"list"}, "which no rank had, were it joined"


@settings(max_examples=50)
@given(st.lists(nests(), min_size=1, max_size=4))
def test_equal_structures_and_unrelated_ones_are_joined(states: list[Any]) -> None:
    structures = [flatten({f"rank{number}": state})[1] for number, state in enumerate(states)]
    together, odd = merged_structure([*structures, *structures])
    assert not odd
    for number in range(len(states)):
        assert Containers(together).find(f"rank{number}") == structures[number].children[0]
    assert merged_structure([structures[0]] * 3) == (structures[0], set())


@pytest.mark.parametrize(
    ("one", "other", "match"),
    [
        ({"a": {"b": 1}}, {"a": {"b": {"c": 1}}}, r"a\.b is a dict on one rank and no container on another"),
        ({"a": {"b": {}}}, {"a": {"b": 1}}, r"a\.b is a dict on one rank and no container on another"),
        ({"a": {"b": {}}}, {"a": {"b": [{}]}}, r"a\.b is a dict on one rank and a list on another"),
        ({"a": {1: 0}}, {"a": {True: 0}}, r"a: two keys of one mapping are equal"),
    ],
    ids=["entry and dict", "dict and entry", "dict and list", "1 and True"],
)
def test_structures_that_do_not_fit_together_are_refused_by_name(one: Any, other: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        merged_structure(flatten(state)[1] for state in (one, other))


def test_tensors_of_a_state_with_an_empty_name_have_the_names_of_their_entries() -> None:
    state = {"": {"w": torch.ones(1)}, "w": torch.zeros(1)}
    assert [*flat_tensors(state)] == [*flatten(state)[0]] == [".w", "w"]
