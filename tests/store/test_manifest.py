import dataclasses
import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torchtitan_lite.errors import CheckpointDamaged, FormatTooNew
from torchtitan_lite.store.digest import BLOCK_BYTES, block_digest
from torchtitan_lite.store.manifest import FORMAT_VERSION, CheckpointKind, FileRecord, Manifest, Table, seal

ADDED_LATER = ("tensors", "objects", "structure")
MANIFEST = Manifest(
    step=500,
    kind=CheckpointKind.FULL,
    created_at=1700000000.25,
    world_size=2,
    versions={"torch": "2.13.0"},
    files={"__0_0.distcp": FileRecord(10), "__1_0.distcp": FileRecord(20)},
    tensors=Table({"w": {"dtype": "float32", "shape": [2], "chunks": [["__0_0.distcp", 0, [0], [2]]]}}),
    objects=Table({"n": {"value": 3}}),
    structure=Table({"root": {"kind": "dict", "keys": ["w", "n"]}}),
    extra={"run_id": "r1", "mesh": [2, 1]},
)


def sealed(document: dict[str, Any]) -> bytes:
    """`document` as somebody wrote it who knows about digests."""
    fields = {name: value for name, value in document.items() if name != "digest"}
    return seal(json.dumps(fields).removesuffix("}").encode())


def edited(**fields: Any) -> bytes:
    return sealed(json.loads(MANIFEST.to_json()) | fields)


def test_a_manifest_is_read_back_as_it_was_written() -> None:
    assert Manifest.parse(MANIFEST.to_json()) == MANIFEST
    assert Manifest.parse(MANIFEST.to_json()).to_json() == MANIFEST.to_json()
    assert MANIFEST.nbytes == 30


def test_whole_seconds_are_seconds() -> None:
    manifest = dataclasses.replace(MANIFEST, created_at=1700000000)
    assert Manifest.parse(manifest.to_json()) == manifest


@settings(max_examples=40)
@given(
    st.builds(
        Manifest,
        step=st.integers(0),
        kind=st.sampled_from(CheckpointKind),
        created_at=st.floats(allow_nan=False, allow_infinity=False),
        world_size=st.integers(1),
        versions=st.dictionaries(st.text(), st.text()),
        files=st.dictionaries(
            st.from_regex(r"\A[\w.]{3,9}\Z"),
            st.builds(FileRecord.of, st.binary()) | st.builds(FileRecord, st.integers(0)),
        ),
        tensors=st.builds(Table, st.dictionaries(st.text(), st.dictionaries(st.text(), st.integers()))),
        extra=st.dictionaries(st.text(), st.integers() | st.text() | st.none()),
    )
)
def test_any_manifest_is_read_back_as_it_was_written(manifest: Manifest) -> None:
    assert Manifest.parse(manifest.to_json()) == manifest


def test_fields_of_a_later_writer_are_passed_over() -> None:
    files = {"__0_0.distcp": {"size": 10, "owner": "d"}, "__1_0.distcp": {"size": 20}}
    assert Manifest.parse(edited(files=files, mood="good")) == MANIFEST


def test_a_newer_format_is_named_and_is_not_called_damage() -> None:
    with pytest.raises(FormatTooNew, match=f"format version {FORMAT_VERSION + 1}.* up to {FORMAT_VERSION}") as caught:
        Manifest.parse(edited(format_version=FORMAT_VERSION + 1, files="of another shape"), "step-5/manifest.json")
    assert caught.value.path == "step-5/manifest.json"
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
    ],
)
def test_a_wrong_field_is_damage_and_is_named(fields: dict[str, Any], finding: str) -> None:
    with pytest.raises(CheckpointDamaged) as caught:
        Manifest.parse(edited(**fields))
    assert finding in caught.value.finding


REQUIRED = [name for name in json.loads(MANIFEST.to_json()) if name not in ("digest", *ADDED_LATER)]


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_damage_and_is_named(field: str) -> None:
    document = json.loads(MANIFEST.to_json())
    del document[field]
    with pytest.raises(CheckpointDamaged, match=rf"{field}: expected \w+, found nothing"):
        Manifest.parse(sealed(document))


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"null", b'{"step": NaN}', b"[" * 100_000, b"1" * 5000])
def test_bytes_that_are_no_manifest_are_damage(data: bytes) -> None:
    with pytest.raises(CheckpointDamaged):
        Manifest.parse(data)


def test_a_torn_manifest_is_damage_wherever_it_is_torn() -> None:
    data = MANIFEST.to_json().rstrip()
    for length in range(len(data)):
        with pytest.raises(CheckpointDamaged):
            Manifest.parse(data[:length])


@given(st.integers(0, len(MANIFEST.to_json()) - 2), st.integers(0, 255))
def test_any_changed_byte_is_damage_and_never_a_newer_format(position: int, byte: int) -> None:
    data = bytearray(MANIFEST.to_json())
    assume(data[position] != byte)
    data[position] = byte
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json"):
        Manifest.parse(bytes(data))


def test_a_manifest_of_the_first_format_is_read_without_digests() -> None:
    document = json.loads(MANIFEST.to_json()) | {"format_version": 1}
    first = {name: value for name, value in document.items() if name not in ("digest", *ADDED_LATER)}
    manifest = Manifest.parse(json.dumps(first, indent=2).encode())
    assert (manifest.step, manifest.nbytes, len(manifest.tensors)) == (500, 30, 0)


def test_a_manifest_of_this_format_without_its_digest_is_damage() -> None:
    document = json.loads(MANIFEST.to_json())
    del document["digest"]
    with pytest.raises(CheckpointDamaged, match="last line"):
        Manifest.parse(json.dumps(document).encode())


def test_a_file_is_digested_in_blocks_that_cover_it() -> None:
    data = bytes(range(256)) * (BLOCK_BYTES // 256) + b"tail"
    record = FileRecord.of(data)
    assert record.blocks == block_digest(data[:BLOCK_BYTES]) + block_digest(b"tail")
    assert len(record.digest) == 32
    assert FileRecord.of(data[:-1]).digest != record.digest
