"""Which batches a run skips after it rolled back, and the record of that."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_lite.disk.durable import DISK
from torchtitan_lite.errors import CheckpointError, CheckpointUnreadable, FormatTooOld
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.rollbacks import (
    Rollback,
    RollbackRecord,
    batch_of,
    batches_to_skip,
    brought_back,
    next_rollback,
    of_run,
    parse_rollbacks,
    to_json,
    unfinished,
    within,
)
from torchtitan_lite.store.store import CheckpointStore

RUN = Lineage("run1")


def following(step: int, found: list[Rollback], lineage: Lineage = RUN) -> Rollback:
    rollback = next_rollback(step, "loss is nan", found, lineage, f"run{len(found) + 2}")
    assert rollback is not None
    return rollback


def test_the_batch_of_the_bad_step_is_left_out_and_the_run_rolls_back_before_it() -> None:
    found = following(7, [])
    assert (found.skipped, found.last, found.run_id, found.left) == (7, 6, "run2", RUN)
    assert [batch_of(step, [7]) for step in (5, 6, 7, 8)] == [5, 6, 8, 9]
    assert [batches_to_skip(step, [found]) for step in (1, 6, 7, 8)] == [0, 0, 1, 0]


def test_if_the_same_step_is_bad_again_the_batch_before_is_left_out_too() -> None:
    first = following(7, [])
    second = following(7, [first])
    assert (second.skipped, second.last) == (6, 5)
    assert [batches_to_skip(step, [first, second]) for step in (5, 6, 7)] == [0, 2, 0]
    third = following(7, [first, second])
    assert (third.skipped, third.last) == (5, 4)


def test_another_bad_step_leaves_out_its_own_batch() -> None:
    first = following(7, [])
    second = following(7, [first])
    # Batches 6 and 7 are skipped, so step 6 trains batch 8.
    third = following(6, [first, second])
    assert (third.skipped, third.last) == (8, 5)


def test_before_the_first_batch_there_is_none_to_leave_out() -> None:
    first = following(1, [])
    assert first.last == 0
    assert next_rollback(1, "loss is nan", [first], RUN, "run3") is None


@given(st.sets(st.integers(1, 60)))
def test_each_batch_is_trained_once_or_left_out(skipped: set[int]) -> None:
    trained = [batch_of(step, skipped) for step in range(1, 80)]
    assert trained == [batch for batch in range(1, 80 + len(skipped)) if batch not in skipped][: len(trained)]
    found = [replace(following(9, []), skipped=batch) for batch in skipped]
    left_out = [batches_to_skip(step, found) for step in range(1, 80)]
    assert [step + sum(left_out[:step]) for step in range(1, 80)] == trained


def test_a_rollback_counts_for_its_run_and_for_the_branches_of_it() -> None:
    found = [following(7, [])]
    assert of_run(found, Lineage("run2")) == tuple(found)
    assert of_run(found, Lineage("run9", ancestors=((8, "run2"), (5, "run1")))) == tuple(found)
    assert of_run(found, Lineage("run9", ancestors=((5, "run1"),))) == tuple(found)
    assert of_run(found, Lineage("run9")) == ()
    # A run that counts its steps from the start again has other batches.
    assert of_run(found, Lineage("run9", ancestors=((-1, "run2"), (5, "run1")))) == ()


def test_only_rollbacks_from_the_last_steps_are_counted() -> None:
    found = [following(7, []), following(100, []), following(120, [])]
    assert [each.step for each in within(109, 10, found)] == [100, 120]
    assert [each.step for each in within(120, 21, found)] == [100, 120]


def test_a_rollback_is_unfinished_until_the_branch_has_a_checkpoint() -> None:
    first = following(7, [])
    second = following(7, [first], RUN.rolled_back("run2", 6))
    assert unfinished([first], RUN.run_id) == first
    assert unfinished([first], RUN.rolled_back("run2", 6).run_id) is None
    # The first branch saved nothing.
    assert unfinished([first, second], RUN.run_id) == second
    assert unfinished([first], Lineage("other").run_id) is None
    assert unfinished([], RUN.run_id) is None


def test_a_rollback_counts_for_no_run_after_a_checkpoint_that_it_left_came_back() -> None:
    branch = Lineage("run2", parent_step=4, ancestors=((4, "run1"),))
    first = replace(following(5, []), target=4)
    second = replace(following(9, [first], branch), run_id="run3")
    assert brought_back([first, second], 4, RUN) == (first, second)
    # The second one, from the branch, leaves what the first one has left, too.
    left = brought_back([first, second], 7, RUN)
    assert left == (replace(first, is_left=True), replace(second, is_left=True))
    assert of_run(left, RUN) == of_run(left, branch) == () and unfinished(left, RUN.run_id) is None
    # It keeps steps of the branch up to its own last one; those that are left come first, the last is on its way.
    assert brought_back([first, second], 8, branch) == (first, second)
    assert brought_back([first, second], 9, branch) == (replace(second, is_left=True), first)
    assert unfinished(brought_back([first, second], 9, branch), RUN.run_id) == first
    # And when the branch comes back after all, it skips its batch again.
    assert brought_back(left, 9, branch) == (replace(second, is_left=True), first)
    assert parse_rollbacks(to_json(left), "rollbacks.json") == left


def test_what_is_left_by_a_second_rollback_is_left_of_both_runs() -> None:
    second = RUN.rolled_back("run2", 40).rolled_back("run3", 20)
    assert second.ancestors == ((20, "run2"), (20, "run1"))
    assert second.last_kept == second.parent_step == 20
    assert all(second.leaves(30, run) for run in ("run1", "run2"))
    assert (second.began_at, RUN.began_at, replace(RUN, ancestors=((-1, "run0"),)).began_at) == (20, None, None)
    # A branch that the same `load_step` continues stays one.
    assert replace(RUN, branch_point=5).rolled_back("run2", 9).branch_point == 5


def test_the_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = CheckpointStore(tmp_path).rollbacks
    assert record.read() == ()
    first = replace(following(7, []), target=6)
    second = following(9, [first], Lineage("run2", parent_step=6, ancestors=((6, "run1"),)))
    record.write([first, second])
    assert RollbackRecord.in_folder(tmp_path, DISK).read() == (first, second)
    assert str(first) == "from step 7 (loss is nan) to step 6, without batch 7"
    assert str(second) == "from step 9 (loss is nan) to step 8 or before, without batch 10"


def test_what_is_no_record_is_one_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / layout.ROLLBACKS
    whole = to_json([following(7, [])])
    for data in (
        b"",
        b"[]",
        b"{",
        whole.replace(b'"skipped": 7', b'"skipped": 0'),
        whole.replace(b"run2", b""[:0])[:50],
    ):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"rollbacks\.json is no record of rollbacks.*move it away"):
            CheckpointStore(tmp_path).rollbacks.read()
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"rollbacks\.json"):
        CheckpointStore(tmp_path).rollbacks.read()


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_one_error(data: bytes) -> None:
    try:
        parse_rollbacks(data, "rollbacks.json")
    except CheckpointError as error:
        assert not isinstance(error, CheckpointUnreadable)


def test_a_record_from_before_the_first_release_is_named_as_such() -> None:
    with pytest.raises(FormatTooOld, match=r"rollbacks\.json has format version 1, from before the first release"):
        parse_rollbacks(b'{"version": 1, "rollbacks": []}\n', "folder/rollbacks.json")


def test_fields_that_a_later_version_added_to_a_rollback_stay_in_the_record() -> None:
    document = json.loads(to_json([following(7, [])])) | {"format_version": 8}
    document["rollbacks"][0]["mood"] = "good"
    [found] = parse_rollbacks(json.dumps(document).encode(), "folder/rollbacks.json")
    assert found.skipped == 7
    assert json.loads(to_json([replace(found, target=6)]))["rollbacks"] == [document["rollbacks"][0] | {"target": 6}]
