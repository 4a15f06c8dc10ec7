"""What head.json says, as a value and as text."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.store.filled import later_format
from torchtitan_lite.bucket.head import Entry, Head, Status
from torchtitan_lite.bucket.head_file import WrongDigest, head_to_bytes, parse_head
from torchtitan_lite.errors import FormatTooNew, FormatTooOld
from torchtitan_lite.store.holder import Holder
from torchtitan_lite.store.manifest import CheckpointKind, seal

FULL, WEIGHTS = CheckpointKind.FULL, CheckpointKind.WEIGHTS_ONLY
PATH = "s3://bucket/run/head.json"


def entry(step: int, number: int = 0, kind: CheckpointKind = FULL, run_id: str = "run0") -> Entry:
    return Entry(step, f"{step * 100 + number:016x}", kind, run_id, "d" * 32)


def statuses(head: Head) -> dict[str, Status]:
    return {each.name: each.status for each in head.entries}


@pytest.fixture
def head() -> Head:
    head = Head().taken_by(Holder.this_process("run0", 1e9), 10.0).with_pins([5], [])
    return head.with_commit(entry(5)).with_commit(entry(10)).with_corrupt(entry(10).name, ["wrong", "x" * 1000])


def test_a_head_survives_being_written(head: Head) -> None:
    assert parse_head(head_to_bytes(head), PATH) == head


def test_the_head_of_a_new_folder_survives_being_written() -> None:
    assert parse_head(head_to_bytes(Head()), PATH) == Head()


def test_any_changed_byte_is_found(head: Head) -> None:
    text = head_to_bytes(head)
    for at in range(len(text)):
        with pytest.raises(WrongDigest):
            parse_head(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :], PATH)


def test_any_cut_is_found(head: Head) -> None:
    text = head_to_bytes(head)
    for length in range(len(text)):
        with pytest.raises(WrongDigest):
            parse_head(text[:length], PATH)


def test_a_later_version_is_no_damage(head: Head) -> None:
    with pytest.raises(FormatTooNew, match=r"s3://bucket/run/head\.json has format version 99"):
        parse_head(later_format(head_to_bytes(head)), PATH)


def test_a_version_from_before_the_release_is_no_damage(head: Head) -> None:
    earlier = head_to_bytes(head).replace(b'"format_version": 7,\n"oldest_reader": 7', b'"format_version": 1')
    with pytest.raises(FormatTooOld, match=r"s3://bucket/run/head\.json has format version 1, from before"):
        parse_head(sealed_again(earlier), PATH)


def test_fields_that_a_later_version_added_stay_with_its_version(head: Head) -> None:
    later = json.loads(head_to_bytes(head)) | {"format_version": 8, "mood": "good"}
    later["checkpoints"] = [each | {"weight": 3} for each in later["checkpoints"]]
    del later["digest"]
    found = parse_head(seal(json.dumps(later).removesuffix("}").encode()), PATH)
    again = json.loads(head_to_bytes(dataclasses.replace(found, change=found.change + 1)))
    assert (again["format_version"], again["oldest_reader"], again["mood"]) == (8, 7, "good")
    assert again["checkpoints"] == later["checkpoints"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epoch", -1),
        ("holder", {"token": 3}),
        ("beat_seconds", -1.0),
        ("pinned", ["5"]),
        ("checkpoints", [3]),
        ("checkpoints", [{"step": 3, "attempt": "../../etc"}]),
    ],
)
def test_a_wrong_field_is_named_and_is_no_damage(head: Head, name: str, value: object) -> None:
    document = json.loads(head_to_bytes(head)) | {name: value}
    del document["digest"]
    text = seal(json.dumps(document).encode().removesuffix(b"}"))
    with pytest.raises(ValueError, match=r"epoch|holder|beat_seconds|pinned|checkpoints|attempt") as raised:
        parse_head(text, PATH)
    assert not isinstance(raised.value, WrongDigest)


def sealed_again(text: bytes) -> bytes:
    return seal(text[: text.rindex(b',\n"digest"')])


def test_ten_thousand_checkpoints_stay_under_four_megabytes() -> None:
    many = tuple(
        dataclasses.replace(entry(step), step=10**9 + step, attempt="f" * 16, run_id="r" * 32) for step in range(10_000)
    )
    head = Head(10**6, 10**9, Holder.this_process("run0", 1e9), 10.0, frozenset(each.step for each in many), many)
    text = head_to_bytes(head)
    assert len(text) < 4_000_000
    assert parse_head(text, PATH) == head


def test_a_second_commit_of_a_step_retires_the_first_in_the_same_change() -> None:
    head = Head().with_commit(entry(5)).with_commit(entry(5, 1))
    assert statuses(head) == {entry(5).name: Status.RETIRED, entry(5, 1).name: Status.KEPT}


def test_weights_that_a_full_checkpoint_replaces_stay() -> None:
    head = Head().with_commit(entry(5, kind=WEIGHTS)).with_commit(entry(5, 1))
    assert statuses(head)[entry(5).name] is Status.WEIGHTS


def test_a_full_checkpoint_that_weights_replace_is_retired() -> None:
    head = Head().with_commit(entry(5)).with_commit(entry(5, 1, WEIGHTS))
    assert statuses(head)[entry(5).name] is Status.RETIRED


def test_a_commit_sets_aside_what_it_abandons() -> None:
    head = Head().with_commit(entry(5)).with_commit(entry(10)).with_commit(entry(15, run_id="run2"))
    head = head.with_commit(entry(10, 1, run_id="run1"), [(10, "run0"), (15, "run0")])
    assert [each.name for each in head.kept] == [entry(5).name, entry(10, 1).name, entry(15).name]
    assert statuses(head)[entry(10).name] is Status.ABANDONED


def test_a_change_that_is_in_it_already_changes_nothing(head: Head) -> None:
    name = entry(5).name
    retired = head.with_pins([], [5]).with_retired(name)
    assert head.with_commit(entry(5)) == head
    assert head.with_pins([5], [6]) == head
    assert retired != head and retired.with_retired(name) == retired
    assert head.with_corrupt(entry(10).name, ["other"]) == head
    assert retired.without([name]).without([name]) == retired.without([name])


def test_a_pinned_step_is_not_retired(head: Head) -> None:
    assert head.with_retired(entry(5).name) == head


def test_only_what_readers_do_not_see_leaves_the_list(head: Head) -> None:
    assert head.without([entry(5).name]) == head
    assert [each.step for each in head.without([entry(10).name]).entries] == [5]
