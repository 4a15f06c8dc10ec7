"""Which checkpoints are uploaded, and what their commit abandons."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind
from torchtitan_lite.store.retention import KeepAll, KeepLatest, RetentionPolicy
from torchtitan_lite.uploading.choice import continues, is_of_another_run, lineage_in, missing, save_of


def info(
    step: int, run: str = "a", *, at: float = 1.0, ancestors: tuple[tuple[int, str], ...] = (), **changes: object
) -> CheckpointInfo:
    lineage = Lineage(run, ancestors=ancestors)
    made = CheckpointInfo(step, Path(f"step-{step}"), CheckpointKind.FULL, at, 10, lineage)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]  # fields of it


def steps(
    source: list[CheckpointInfo], target: list[CheckpointInfo], policy: RetentionPolicy, **more: object
) -> list[int]:
    found = missing(source, target, policy, now=2.0, **more)  # type: ignore[arg-type]  # its arguments
    return [each.step for each in found]


def test_the_latest_one_comes_first() -> None:
    assert steps([info(1), info(2), info(3)], [info(1)], KeepAll()) == [3, 2]


def test_what_the_rules_would_remove_there_is_not_sent() -> None:
    source = [info(step) for step in (1, 2, 3)]
    assert steps(source, [], KeepLatest(2)) == [3, 2]
    assert steps(source, [info(2), info(3)], KeepLatest(2)) == []
    assert steps(source, [], KeepLatest(1), pinned={1}) == [3, 1]


def test_a_step_that_was_saved_again_is_sent_again() -> None:
    assert steps([info(2, at=5.0)], [info(2)], KeepAll()) == [2]


def test_weights_are_sent_too() -> None:
    weights = info(4, kind=CheckpointKind.WEIGHTS_ONLY)
    assert steps([info(3), weights], [info(3)], KeepLatest(1)) == [4]


def test_a_folder_with_the_checkpoints_of_another_run_is_recognized() -> None:
    assert is_of_another_run([info(1, "a")], [info(1, "b")])
    assert not is_of_another_run([], [info(1, "b")])
    assert not is_of_another_run([info(1, "a")], [])
    assert not is_of_another_run([info(2, "a")], [info(1, "b"), info(2, "a")])
    branch = info(12, "b", ancestors=((10, "a"),))
    assert not is_of_another_run([branch], [info(20, "a")])
    assert not is_of_another_run([info(20, "a")], [branch])
    assert is_of_another_run([branch], [info(20, "x")])


def test_the_commit_of_a_branch_abandons_what_its_run_has_left() -> None:
    there = [info(10), info(20), info(30), info(40, "x")]
    branch = Lineage("b", branch_point=10, ancestors=((10, "a"),))
    assert lineage_in(there, branch).abandons == ((20, "a"), (30, "a"))
    again = Lineage("c", ancestors=((-1, "a"),))
    assert lineage_in(there, again).abandons == ((10, "a"), (20, "a"), (30, "a"))


def test_an_old_step_that_comes_late_abandons_no_later_branch() -> None:
    there = [info(30, "c", ancestors=((20, "b"), (10, "a"))), info(40, "c", ancestors=((20, "b"), (10, "a")))]
    old = Lineage("b", branch_point=10, ancestors=((10, "a"),))
    assert lineage_in(there, old) == old


def test_a_branch_is_sent_however_many_steps_of_the_run_that_it_left_are_there() -> None:
    branch = [info(step, "b", ancestors=((4, "a"),)) for step in (7, 8)]
    assert steps(branch, [info(11), info(12)], KeepLatest(2)) == [8, 7]
    assert steps([info(step, "c", ancestors=((-1, "a"),)) for step in (1, 2)], [info(11), info(12)], KeepLatest(2)) == [
        2,
        1,
    ]


def test_what_the_run_there_has_left_is_not_sent() -> None:
    branch = info(5, "b", ancestors=((4, "a"),))
    assert steps([info(4), info(5), info(6)], [branch], KeepAll()) == [4]
    assert steps([info(4), info(5), info(6), info(7, "b", ancestors=((4, "a"),))], [branch], KeepAll()) == [7, 4]


def test_a_save_is_known_by_step_run_and_time() -> None:
    assert save_of(info(3, "b", at=7.0)) == (3, "b", 7.0)


def test_the_run_continues_from_a_later_step_of_its_own_or_from_a_branch_of_it() -> None:
    assert continues(None, info(3))
    assert continues(info(3), info(4))
    assert not continues(info(3), info(3))
    assert not continues(info(3, "b", ancestors=((2, "a"),)), info(9))
    assert continues(info(9), info(3, "b", ancestors=((2, "a"),)))
    assert continues(info(1), info(3, "b", ancestors=((2, "a"),)))
