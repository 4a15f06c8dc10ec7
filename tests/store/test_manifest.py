import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.store.a_manifest import MANIFEST, sealed
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord, block_digest
from torchtitan_lite.errors import CheckpointDamaged, FormatTooNew, FormatTooOld
from torchtitan_lite.store import manifest_fields
from torchtitan_lite.store.format_version import FORMAT_VERSION
from torchtitan_lite.store.manifest import CheckpointKind, Manifest, Table, seal


def edited(**fields: Any) -> bytes:
    return sealed(json.loads(MANIFEST.to_json()) | fields)


def test_a_manifest_is_read_back_as_it_was_written() -> None:
    assert Manifest.parse(MANIFEST.to_json()) == MANIFEST
    assert Manifest.parse(MANIFEST.to_json()).to_json() == MANIFEST.to_json()
    assert MANIFEST.nbytes == 30


def test_whole_seconds_are_seconds() -> None:
    manifest = dataclasses.replace(MANIFEST, created_at=1700000000)
    assert Manifest.parse(manifest.to_json()) == manifest


INT64 = (1 << 63) - 1
# Half a surrogate pair is not valid text.
KEYS = st.text(st.characters(codec="utf-8"))
FIELDS = {value for name, value in vars(manifest_fields).items() if name.isupper() and isinstance(value, str)}
"""Names in `extra` that have types: Hypothesis draws strings that it finds in the code."""


@settings(max_examples=40)
@given(
    st.builds(
        Manifest,
        step=st.integers(0, INT64),
        kind=st.sampled_from(CheckpointKind),
        created_at=st.floats(allow_nan=False, allow_infinity=False),
        world_size=st.integers(1, INT64),
        versions=st.dictionaries(st.text(), st.text()),
        files=st.dictionaries(
            st.from_regex(r"\A[\w.]{3,9}\Z"),
            st.builds(FileRecord.of, st.binary()) | st.builds(FileRecord, st.integers(0, INT64)),
        ),
        tensors=st.builds(Table, st.dictionaries(KEYS, st.dictionaries(st.text(), st.integers()))),
        extra=st.dictionaries(st.text().filter(lambda name: name not in FIELDS), st.integers() | st.text() | st.none()),
    )
)
def test_any_manifest_is_read_back_as_it_was_written(manifest: Manifest) -> None:
    assert Manifest.parse(manifest.to_json()) == manifest


def test_fields_of_a_later_writer_are_ignored_and_kept_with_its_version() -> None:
    later = {"format_version": FORMAT_VERSION + 1, "oldest_reader": FORMAT_VERSION, "mood": "good"}
    manifest = Manifest.parse(edited(**later))
    assert dataclasses.replace(manifest, unknown={}) == MANIFEST
    assert manifest.format_version == FORMAT_VERSION + 1
    written = json.loads(dataclasses.replace(manifest, step=501).to_json())
    assert {name: written[name] for name in (*later, "step")} == {**later, "step": 501}


def test_a_format_that_needs_a_later_reader_is_named_and_is_no_damage() -> None:
    later = {"format_version": FORMAT_VERSION + 2, "oldest_reader": FORMAT_VERSION + 1}
    with pytest.raises(FormatTooNew, match=f"format version {FORMAT_VERSION + 2}.* up to {FORMAT_VERSION}") as caught:
        Manifest.parse(edited(**later, files="of another shape"), "step-5/manifest.json")
    assert caught.value.path == "step-5/manifest.json"
    assert not isinstance(caught.value, CheckpointDamaged)


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION))
@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_format_from_before_the_release_is_named_and_is_no_damage(version: int, is_sealed: bool) -> None:
    data = edited(format_version=version, files="of another shape")
    if not is_sealed:
        data = json.dumps({name: value for name, value in json.loads(data).items() if name != "digest"}).encode()
    with pytest.raises(FormatTooOld, match=f"format version {version}, from before the first release") as caught:
        Manifest.parse(data, "step-5/manifest.json")
    assert not isinstance(caught.value, CheckpointDamaged)


@pytest.mark.parametrize(
    ("fields", "finding"),
    [
        ({"format_version": 0}, "format_version: expected at least 1, found 0"),
        ({"step": "500"}, "step: expected int, found str"),
        ({"step": True}, "step: expected int, found bool"),
        ({"step": -1}, "step: expected at least 0, found -1"),
        ({"step": None}, "step: expected int, found NoneType"),
        ({"kind": "half"}, "'half' is not a valid CheckpointKind"),
        ({"created_at": "today"}, "created_at: expected float, found str"),
        ({"world_size": 0}, "world_size: expected at least 1, found 0"),
        ({"versions": {"torch": 2}}, "torch: expected str, found int"),
        ({"files": []}, "files: expected dict, found list"),
        ({"files": {"__0_0.distcp": 10}}, "__0_0.distcp: expected dict, found int"),
        ({"files": {"__0_0.distcp": {}}}, "size: expected int, found nothing"),
        ({"files": {"__0_0.distcp": {"size": -1}}}, "size: expected at least 0"),
        ({"files": {"../secret": {"size": 1}}}, "'../secret' is not the name of a file"),
        ({"files": {"..": {"size": 1}}}, "'..' is not the name of a file"),
        ({"files": {".": {"size": 1}}}, "'.' is not the name of a file"),
        ({"files": {"": {"size": 1}}}, "'' is not the name of a file"),
        ({"files": {"a\\b": {"size": 1}}}, "is not the name of a file"),
        ({"files": {"a\0": {"size": 1}}}, "is not the name of a file"),
        *(
            ({"files": {"a": {"size": 10, "blocks": blocks}}}, f"blocks: expected str, found {kind}")
            for blocks, kind in ((5, "int"), (None, "NoneType"), (["aa"], "list"), (1.5, "float"), (True, "bool"))
        ),
        ({"files": {"a": {"size": 10, "blocks": "no hex"}}}, "non-hexadecimal number"),
        ({"files": {"a": {"size": 10, "blocks": "aa" * 7}}}, "a: expected the digests of 1 blocks, found 7 bytes"),
        ({"files": {"a": {"size": 10, "blocks": "aa" * 16}}}, "a: expected the digests of 1 blocks, found 16 bytes"),
        ({"files": {"a": {"size": 1 << 21, "blocks": "aa" * 8}}}, "a: expected the digests of 2 blocks, found 8 bytes"),
        ({"files": {"a": {"size": 0, "blocks": "aa" * 8}}}, "a: expected the digests of 0 blocks, found 8 bytes"),
        ({"created_at": 5}, "created_at: expected float, found int"),
        ({"world_size": "2"}, "world_size: expected int, found str"),
        ({"kind": ["full"]}, "kind: expected str, found list"),
        ({"extra": None}, "extra: expected dict, found NoneType"),
        ({"lineage": {"run_id": "../up"}}, "lineage: run_id: expected letters and digits"),
        ({"tensors": []}, "tensors: expected dict, found list"),
        ({"tensors": {"w": 5}}, "w: expected dict, found int"),
        ({"objects": {"n": ["path"]}}, "n: expected dict, found list"),
    ],
)
def test_a_wrong_field_is_damage_and_is_named(fields: dict[str, Any], finding: str) -> None:
    with pytest.raises(CheckpointDamaged) as caught:
        Manifest.parse(edited(**fields))
    assert finding in caught.value.finding


REQUIRED = [name for name in json.loads(MANIFEST.to_json()) if name != "digest"]


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_damage_and_is_named(field: str) -> None:
    document = json.loads(MANIFEST.to_json())
    del document[field]
    with pytest.raises(CheckpointDamaged, match=rf"{field}: expected \w+, found nothing"):
        Manifest.parse(sealed(document))


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"null", b'{"step": NaN}', b"[" * 100_000, b"1" * 5000])
def test_bytes_that_are_not_a_manifest_are_damage(data: bytes) -> None:
    with pytest.raises(CheckpointDamaged):
        Manifest.parse(data)


def test_a_manifest_truncated_anywhere_is_damage() -> None:
    data = MANIFEST.to_json().rstrip()
    for length in range(len(data)):
        with pytest.raises(CheckpointDamaged):
            Manifest.parse(data[:length])


@given(st.integers(0, len(MANIFEST.to_json()) - 1), st.integers(0, 255))
def test_any_changed_byte_is_damage_and_never_a_newer_format(position: int, byte: int) -> None:
    data = bytearray(MANIFEST.to_json())
    assume(data[position] != byte)
    data[position] = byte
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json"):
        Manifest.parse(bytes(data))


def test_a_manifest_of_this_format_without_its_digest_is_damage() -> None:
    document = json.loads(MANIFEST.to_json())
    del document["digest"]
    with pytest.raises(CheckpointDamaged, match="last line"):
        Manifest.parse(json.dumps(document).encode())


def test_a_file_is_digested_in_blocks_that_cover_it() -> None:
    data = bytes(range(256)) * (BLOCK_BYTES // 256) + b"tail"
    record = FileRecord.of(data)
    assert record.blocks == block_digest(data[:BLOCK_BYTES]) + block_digest(b"tail")
    assert FileRecord.of(data[:-1]).blocks != record.blocks


def with_line(name: str, text: str) -> bytes:
    """Return the manifest with the table `name` as `text`, on a line of its own."""
    lines = MANIFEST.to_json().decode().split("\n")
    found = [f'"{name}": {text},' if line.startswith(f'"{name}": ') else line for line in lines]
    assert found != lines
    return seal("\n".join(found).partition(',\n"digest"')[0].encode())


@pytest.mark.parametrize("name", ["tensors", "objects"])
@pytest.mark.parametrize(
    "text",
    ['{"w" 5}', '{"w": NaN}', '{"w": 5}', '{"w": []}', '{"w": {"a": Infinity}}', "{,}", '{"w": {}, "\\ud800": {}}'],
)
def test_a_wrong_table_is_damage_at_the_first_access(name: str, text: str) -> None:
    manifest = Manifest.parse(with_line(name, text), "step-5/manifest.json")
    for look in (len, list, lambda table: table["w"], lambda table: "w" in table):
        with pytest.raises(CheckpointDamaged, match=r"step-5 is damaged: manifest\.json: ") as caught:
            look(getattr(manifest, name))
        assert caught.value.path == "step-5"


def test_a_table_is_parsed_at_the_first_access_and_written_back_unchanged() -> None:
    data = with_line("tensors", '{ "v": {"dtype": "int8"},  "w": {} }')
    manifest = Manifest.parse(data)
    assert dict(manifest.tensors) == {"v": {"dtype": "int8"}, "w": {}}
    assert manifest.tensors.text == b'{ "v": {"dtype": "int8"},  "w": {} }'
    assert manifest.to_json() == data


def test_the_lines_of_a_manifest_are_what_other_versions_read() -> None:
    manifest = dataclasses.replace(MANIFEST, files={"b": FileRecord.of(b"abc"), "a": FileRecord(10)})
    assert manifest.to_json().decode().split("\n")[:-3] == [
        "{",
        '"format_version": 7,',
        '"oldest_reader": 7,',
        '"step": 500,',
        '"kind": "full",',
        '"created_at": 1700000000.25,',
        '"world_size": 2,',
        '"versions": {"torch":"2.13.0"},',
        '"lineage": {"run_id":"unknown","parent_step":null,"branch_point":null,"abandons":[]},',
        '"files": {"a":{"size":10,"blocks":""},"b":{"size":3,"blocks":"78af5f94892f3950"}},',
        '"files_of_ranks": {"sizes":[],"record_sizes":[],"digests":""},',
        '"extra": {"run_id":"r1","mesh":[2,1]},',
        '"objects": {"n":{"value":3}},',
        '"tensors": {"w":{"dtype":"float32","shape":[2],"chunks":[["__0_0.distcp",0,[0],[2]]]}},',
        '"structure": {"root":{"kind":"dict","keys":["w","n"]}},',
    ]


def test_a_value_that_is_not_a_json_number_is_not_written() -> None:
    for manifest in (
        dataclasses.replace(MANIFEST, extra={"loss": float("nan")}),
        dataclasses.replace(MANIFEST, created_at=float("inf")),
    ):
        with pytest.raises(ValueError, match="not JSON compliant"):
            manifest.to_json()


def test_a_time_that_is_not_a_number_of_seconds_is_damage() -> None:
    data = MANIFEST.to_json().replace(b"1700000000.25", b"1e999")
    with pytest.raises(CheckpointDamaged, match="created_at: expected seconds, found inf"):
        Manifest.parse(seal(data.partition(b',\n"digest"')[0]))


def test_the_error_for_a_wrong_digest_quotes_the_digest() -> None:
    data = MANIFEST.to_json()
    digest = data[-36:-4].decode()
    with pytest.raises(CheckpointDamaged, match=f"its own digest is not the {digest} of its last line"):
        Manifest.parse(data.replace(b'"step": 500', b'"step": 501'))
    with pytest.raises(CheckpointDamaged, match="its last line is not its digest"):
        Manifest.parse(data.removesuffix(b"\n"))


def test_the_manifest_of_a_folder_is_the_one_in_it(tmp_path: Path) -> None:
    assert Manifest.of_folder(tmp_path) is None
    (tmp_path / "manifest.json").write_bytes(MANIFEST.to_json())
    assert Manifest.of_folder(tmp_path) == MANIFEST
    (tmp_path / "manifest.json").write_bytes(b"{")
    with pytest.raises(CheckpointDamaged, match=f"{tmp_path} is damaged: manifest.json: "):
        Manifest.of_folder(tmp_path)
