"""The text of manifest.json, byte by byte: readers of other versions and people with a pager rely on it."""

from __future__ import annotations

import dataclasses
import math

import pytest

from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord
from torchtitan_lite.errors import CheckpointDamaged
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointKind, Manifest, Table, seal

MANIFEST = Manifest(
    step=500,
    kind=CheckpointKind.FULL,
    created_at=1700000000,
    world_size=2,
    versions={"torch": "2.13.0"},
    files={name: FileRecord.of(b"bytes") for name in ("__2_0.distcp", "__0_0.distcp")}
    | {".metadata": FileRecord.of(b"abc")},
    lineage=Lineage("a1", parent_step=400, branch_point=300, abandons=((350, "b2"), (450, "b2"))),
    tensors=Table({"w": {"dtype": "float32", "shape": [2], "chunks": [["__0_0.distcp", 0, [0], [2]]]}}),
    objects=Table({"n": {"value": 3}}),
    structure=Table({"root": {"kind": "dict", "keys": ["w", "n"]}}),
    extra={"mesh": [2, 1]},
)
LINES = [
    "{",
    '"format_version": 7,',
    '"oldest_reader": 7,',
    '"step": 500,',
    '"kind": "full",',
    '"created_at": 1700000000.0,',
    '"world_size": 2,',
    '"versions": {"torch":"2.13.0"},',
    '"lineage": {"run_id":"a1","parent_step":400,"branch_point":300,"abandons":[[350,"b2"],[450,"b2"]]},',
    '"files": {".metadata":{"size":3,"blocks":"78af5f94892f3950"}},',
    '"files_of_ranks": {"sizes":[5,null,5],"record_sizes":[],"digests":"BLOCKSBLOCKS"},',
    '"extra": {"mesh":[2,1]},',
    '"objects": {"n":{"value":3}},',
    '"tensors": {"w":{"dtype":"float32","shape":[2],"chunks":[["__0_0.distcp",0,[0],[2]]]}},',
    '"structure": {"root":{"kind":"dict","keys":["w","n"]}},',
]


def test_every_field_has_a_line_and_the_last_one_is_the_digest_of_all_before() -> None:
    text = MANIFEST.to_json().decode()
    *lines, digest, end, nothing = text.split("\n")
    record = MANIFEST.files["__0_0.distcp"]
    assert lines == [line.replace("BLOCKS", record.blocks.hex()) for line in LINES]
    assert (end, nothing) == ("}", "")
    assert digest.startswith('"digest": "')
    assert seal("\n".join(lines).removesuffix(",").encode()) == text.encode()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_lacks_is_not_written(number: float) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        dataclasses.replace(MANIFEST, extra={"loss": number}).to_json()
    with pytest.raises(ValueError, match="JSON compliant"):
        dataclasses.replace(MANIFEST, tensors=Table({"w": {"scale": number}})).to_json()


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("table", ["objects", "extra"])
def test_a_number_that_json_lacks_is_damage_and_is_named(constant: str, table: str) -> None:
    lines = {"objects": '"objects": {"n":{"value":%s}},', "extra": '"extra": {"n":%s},'}
    text = "\n".join(LINES).replace("BLOCKS", "aa" * 8).removesuffix(",")
    changed = "\n".join(lines[table] % constant if line.startswith(f'"{table}"') else line for line in text.split("\n"))
    with pytest.raises(CheckpointDamaged, match=f"{constant} is not a JSON number"):
        Manifest.parse(seal(changed.encode())).objects.get("n")


@pytest.mark.parametrize(
    ("size", "num_bytes", "is_sound"),
    [
        (0, 8, False),
        (1, 8, True),
        (1, 16, False),
        (BLOCK_BYTES, 8, True),
        (BLOCK_BYTES + 1, 8, False),
        (BLOCK_BYTES + 1, 16, True),
        (BLOCK_BYTES + 1, 15, False),
        (5 * BLOCK_BYTES, 40, True),
        (1, 0, True),
    ],
)
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_file_has_eight_bytes_of_digest_for_each_block_or_none_at_all(
    name: str, size: int, num_bytes: int, is_sound: bool
) -> None:
    manifest = dataclasses.replace(MANIFEST, files={name: FileRecord(size, bytes(num_bytes))})
    if is_sound:
        assert Manifest.parse(manifest.to_json()) == manifest
    else:
        with pytest.raises(CheckpointDamaged, match=f"found {num_bytes} bytes"):
            Manifest.parse(manifest.to_json())


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "a\\b", "a\0b"])
def test_a_name_that_cannot_be_a_file_of_the_folder_is_damage(name: str) -> None:
    manifest = dataclasses.replace(MANIFEST, files={name: FileRecord(1)})
    with pytest.raises(CheckpointDamaged, match="is not the name of a file"):
        Manifest.parse(manifest.to_json())


def test_a_table_is_parsed_at_the_first_access_and_damage_names_its_file() -> None:
    text = "\n".join(LINES).replace("BLOCKS", "aa" * 8).removesuffix(",")
    damaged = seal(text.replace('"objects": {"n":{', '"objects": {"n":{{').encode())
    manifest = Manifest.parse(damaged, "step-5/manifest.json")
    assert "w" in manifest.tensors
    with pytest.raises(CheckpointDamaged) as caught:
        manifest.objects.get("n")
    assert (caught.value.path, caught.value.finding.partition(": ")[0]) == ("step-5", "manifest.json")


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ('{"n":3}', "n: expected dict, found int"),
        ("{1:2}", "property name"),
        ('{"\\ud800":{}}', "is not valid text"),
    ],
)
def test_a_table_of_anything_but_objects_is_damage(entries: str, found: str) -> None:
    text = "\n".join(LINES).replace("BLOCKS", "aa" * 8).removesuffix(",")
    changed = text.replace('{"n":{"value":3}}', entries)
    with pytest.raises(CheckpointDamaged, match=found):
        Manifest.parse(seal(changed.encode())).objects.get("n")


def test_anything_but_an_object_in_the_place_of_a_table_is_damage() -> None:
    text = "\n".join(LINES).replace("BLOCKS", "aa" * 8).removesuffix(",")
    changed = text.replace('{"n":{"value":3}}', "[]")
    with pytest.raises(CheckpointDamaged, match="objects: expected dict, found list"):
        Manifest.parse(seal(changed.encode()))
