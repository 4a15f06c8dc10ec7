"""Tensors in columns are the tensors that JSON's parser and a look at each of them find, in any text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_lite.checkpoint.format.contents import Chunk, Contents, StoredTensor
from torchtitan_lite.checkpoint.format.dtypes import DTYPES
from torchtitan_lite.checkpoint.format.tensor_table import BadEntry, TensorTable
from torchtitan_lite.errors import CheckpointDamaged
from torchtitan_lite.store.manifest import Table

FILES = ("__0_0.distcp", "__1_0.distcp")
SHAPES = st.lists(st.integers(0, 9), max_size=3)
PLACES = st.integers(0, 500)


@st.composite
def entries(draw: st.DrawFn) -> dict[str, Any]:
    """Return the entry of a tensor: of one whole chunk, mostly, as in a manifest, in runs or of two; or a wrong one."""
    shape = draw(SHAPES)
    file, at = draw(st.sampled_from(FILES)), draw(PLACES)
    chunks = [[file, at, [0] * len(shape), shape]]
    kind = draw(st.sampled_from(["whole"] * 6 + ["runs", "runs", "halves", "moved", "negative", "none"]))
    if kind == "runs":
        run = [shape[0] if shape and shape[0] else 1, [0, 1], at, 0, [0] * len(shape), [1, *shape[1:]] if shape else []]
        return {"dtype": "float32", "shape": shape, "runs": [run] * (run[0] == 1 or bool(shape))}
    if kind == "halves" and shape and shape[0] > 1:
        first, rest = [1, *shape[1:]], [shape[0] - 1, *shape[1:]]
        zeros = [0] * (len(shape) - 1)
        chunks = [[file, at, [0, *zeros], first], [file, at + 100, [1, *zeros], rest]]
    elif kind == "moved":
        chunks = [[file, at, [1] * len(shape), shape]]
    elif kind == "negative":
        chunks = [[file, -at, [0] * len(shape), shape]]
    elif kind == "none":
        chunks = []
    return {"dtype": draw(st.sampled_from(["float32", "bool", "complex64"])), "shape": shape, "chunks": chunks}


TABLES = st.dictionaries(st.text("ab.é\\\"'{},:[]0\x7f\n", max_size=4), entries(), max_size=6)


def text_of(table: dict[str, Any]) -> str:
    return json.dumps(table, separators=(",", ":"))


def by_json(text: str) -> dict[str, StoredTensor] | str:
    """Return the tensors that JSON's parser finds in `text`, each looked at by itself; or the error."""
    table = Table.of_text(text.encode(), "c/manifest.json")
    try:
        dict(table)  # Now the text is parsed, and only the entries are left.
        return dict(TensorTable.parse(table, DTYPES))
    except (BadEntry, CheckpointDamaged) as error:
        return str(error)


def by_columns(text: str) -> dict[str, StoredTensor] | str:
    try:
        return dict(TensorTable.parse(Table.of_text(text.encode(), "c/manifest.json"), DTYPES))
    except (BadEntry, CheckpointDamaged) as error:
        return str(error)


def assert_same(text: str) -> None:
    expected, found = by_json(text), by_columns(text)
    assert found == expected
    assert list(found) == list(expected), "in the same order"


@given(TABLES)
def test_a_table_has_the_tensors_of_its_entries(table: dict[str, Any]) -> None:
    assert_same(text_of(table))
    assert_same(json.dumps(table))


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "model.c"]), entries()), max_size=4),
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 2), st.text('",:[]{}0123a\\ \n\x00é', max_size=3)), max_size=3
    ),
)
@settings(max_examples=300)
def test_a_changed_text_means_what_it_means_to_the_parser_of_json(
    rows: list[tuple[str, Any]], edits: list[tuple[int, int, str]]
) -> None:
    text = "{" + ",".join(f'"{key}":{text_of(entry)}' for key, entry in rows) + "}"
    for at, count, new in edits:
        at %= len(text) + 1
        text = text[:at] + new + text[at + count :]
    assert_same(text)


WIDE_ONE = "\uff11"
WHOLE = '{"dtype":"float32","shape":[2],"chunks":[["f",8,[0],[2]]]}'

RUNS = '{"dtype":"float32","shape":[4],"runs":[[4,[0,1],8,0,[0],[1]]]}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{}",
        f'{{"a":{WHOLE}}}',
        f'{{"a":{WHOLE},"b":{WHOLE}}}',
        f'{{"a":{WHOLE},"a":{WHOLE.replace("8", "9")}}}',
        f'{{"a":{WHOLE}}}"b":{WHOLE}}}',
        f'{{"a":{WHOLE},}}',
        f'{{,"a":{WHOLE}}}',
        f'{{"a":{WHOLE}}}}}',
        f'{{"a":{WHOLE}}}\n',
        f'[{{"a":{WHOLE}}}]',
        f'{{"a":{WHOLE.replace("8", "08")}}}',
        f'{{"a":{WHOLE.replace("8", "-8")}}}',
        f'{{"a":{WHOLE.replace("8", "8.0")}}}',
        f'{{"a":{WHOLE.replace("8", "9" * 30)}}}',
        f'{{"a":{WHOLE.replace("8", "9" * 5000)}}}',
        f'{{"a":{WHOLE.replace("[2]", "[02]")}}}',
        f'{{"a":{WHOLE.replace("[2]", "[2,]")}}}',
        f'{{"a":{WHOLE.replace("[2]", "[" + "9" * 5000 + "]")}}}',
        f'{{"a":{WHOLE.replace("float32", "float33")}}}',
        f'{{"a":{WHOLE.replace("float32", WIDE_ONE)}}}',
        f'{{"a\\u00e9":{WHOLE}}}',
        f'{{"a\\ud800":{WHOLE}}}',
        f'{{"a\tb":{WHOLE}}}',
        f'{{"a":{WHOLE.replace(":[0],", ":[0,0],")}}}',
        f'{{"a":{WHOLE.replace("[0]", "[1]")}}}',
        f'{{"a":{WHOLE.replace("]]]", "]],[]]")}}}',
        f'{{"a":{WHOLE[:-1]},"x":1}}}}',
        f'{{"a":{RUNS}}}',
        f'{{"a":{WHOLE},"b":{RUNS},"c":{WHOLE}}}',
        f'{{"a":{RUNS},"a":{WHOLE}}}',
        f'{{"a":{RUNS},"b":{RUNS}}}}}',
        f'{{"a":{RUNS},"b":{RUNS.replace("4", "04")}}}',
        f'{{"a":{RUNS.replace("4", "9" * 5000)}}}',
        f'{{"a":{RUNS.replace("[4", "[" * 5000 + "4")}}}',
        f'{{"a":{RUNS.replace("]]]", "]]")}}}',
        f'{{"a":{RUNS.replace("float32", "float33")}}}',
        f'{{"a":{RUNS[:-1]},"x":1}}}}',
        f'{{"a":{RUNS[:-1]},"chunks":[]}}}}',
    ],
)
def test_texts_at_the_edge_of_what_is_read_in_columns_mean_what_they_mean_to_the_parser_of_json(text: str) -> None:
    assert_same(text)


def test_a_manifest_s_own_text_is_read_in_columns() -> None:
    table = {
        f"model.{n}": {"dtype": "int8", "shape": [3, 2], "chunks": [["f", 6 * n, [0, 0], [3, 2]]]} for n in range(5)
    }
    found = TensorTable.parse(Table.of_text(text_of(table).encode(), "c"), DTYPES)
    assert len({*found.kinds.values()}) == 1
    assert (list(found), dict(found.places), dict(found.others)) == (
        list(table),
        {f"model.{n}": 6 * n for n in range(5)},
        {},
    )
    assert found["model.2"] == StoredTensor(DTYPES["int8"], (3, 2), [Chunk("f", 12, (0, 0), (3, 2))])
    with pytest.raises(KeyError):
        found["model.5"]


def finding(contents: Contents, files: dict[str, int]) -> str:
    try:
        contents.check(files)
    except CheckpointDamaged as error:
        return str(error)
    return ""


@given(TABLES, st.integers(0, 900), st.integers(0, 900), st.booleans())
def test_columns_are_refused_when_and_as_the_same_tensors_one_by_one_are(
    table: dict[str, Any], first: int, second: int, both: bool
) -> None:
    files = {FILES[0]: first} | ({FILES[1]: second} if both else {})
    tensors = dict(TensorTable.parse(Table(table), DTYPES))
    one_by_one = TensorTable(tensors, {}, {}, tensors)
    in_columns = Contents("c", TensorTable.of(tensors), {})
    assert finding(in_columns, files) == finding(Contents("c", one_by_one, {}), files)
    assert in_columns.files == Contents("c", one_by_one, {}).files
    assert in_columns.table.nbytes == sum(tensor.nbytes for tensor in tensors.values())
