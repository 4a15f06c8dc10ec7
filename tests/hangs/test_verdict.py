"""Which rank hangs, from what the watchers of all ranks found."""

from __future__ import annotations

from typing import Any

import pytest

from torchtitan_lite.hangs.verdict import Evidence, HangVerdict, frames_of, judge, report

TORCH = "/venv/site-packages/torch"
IN_COLLECTIVE = (
    f"{TORCH}/distributed/distributed_c10d.py:3216 in all_reduce",
    f"{TORCH}/distributed/c10d_logger.py:83 in wrapper",
    "/job/torchtitan_lite/distributed/reduce.py:30 in mean_over_ranks",
    "/job/torchtitan_lite/trainer.py:290 in _train_step",
)
IN_MODEL = (
    "/job/torchtitan_lite/models/llama/model.py:90 in forward",
    f"{TORCH}/nn/modules/module.py:1790 in _call_impl",
    f"{TORCH}/distributed/algorithms/_checkpoint/checkpoint_wrapper.py:170 in forward",
    f"{TORCH}/distributed/pipelining/schedules.py:700 in step",
)
DUMP = """Current thread 0x00007f02 (most recent call first):
  File "/job/torchtitan_lite/trainer.py", line 221 in _train
  File "/job/train.py", line 8 in <module>
"""


def rank(number: int, **more: Any) -> Evidence:
    """Return what is found of a rank that waits in a collective, except for what `more` says."""
    return Evidence(
        **{"rank": number, "host": "node1", "pid": 7, "step": 5, "seconds": 3.0, "stack": IN_COLLECTIVE} | more
    )


def named(*found: Evidence, silent: tuple[int, ...] = ()) -> tuple[int, ...] | None:
    verdict = judge(found, silent=silent)
    return verdict and verdict.ranks


def test_a_stopped_rank_is_named_before_all_others() -> None:
    assert named(rank(0, answers=False), rank(1, is_stopped=True), rank(2, stack=IN_MODEL), silent=(3,)) == (1,)


def test_a_stopped_rank_is_named_in_a_pause_too() -> None:
    assert named(rank(0), rank(1, is_stopped=True, seconds=0.0)) == (1,)


def test_no_rank_is_named_while_another_one_is_in_a_pause_or_has_just_ended_a_step() -> None:
    assert named(rank(0), rank(1, seconds=0.0, stack=IN_MODEL, answers=False)) is None


def test_a_rank_that_runs_no_python_is_named() -> None:
    assert named(rank(0), rank(1, answers=False, stack=())) == (1,)


def test_that_no_rank_runs_python_says_nothing_about_one() -> None:
    assert named(rank(0, answers=False), rank(1, answers=False, stack=IN_MODEL)) == (1,)


def test_a_rank_whose_watcher_is_gone_is_named() -> None:
    assert named(rank(0), rank(2), silent=(1,)) == (1,)


def test_the_rank_with_fewer_collectives_is_named_though_its_stack_is_the_same() -> None:
    counts = [{"dp from rank 0": 12}, {"dp from rank 0": 11}]
    assert named(*(rank(number, collectives=count) for number, count in enumerate(counts))) == (1,)


def test_a_rank_that_is_behind_because_it_waits_for_another_one_is_not_named() -> None:
    """Rank 0 hangs; rank 1 waits for it in one group, and rank 3 for rank 1 in another."""
    counts = [
        {"tp from rank 0": 4, "dp from rank 0": 7},
        {"tp from rank 0": 5, "dp from rank 1": 7},
        {"tp from rank 2": 5, "dp from rank 0": 8},
        {"tp from rank 2": 5, "dp from rank 1": 8},
    ]
    assert named(*(rank(number, collectives=count) for number, count in enumerate(counts))) == (0,)


def test_a_rank_in_no_collective_is_named_if_the_counts_are_equal() -> None:
    assert named(rank(0, collectives={"dp": 3}), rank(1, collectives={"dp": 3}, stack=IN_MODEL)) == (1,)


def test_all_ranks_are_named_if_nothing_distinguishes_them() -> None:
    assert named(rank(0), rank(1)) == (0, 1)
    assert named(rank(0, stack=IN_MODEL), rank(1, stack=IN_MODEL)) == (0, 1)


def test_the_only_rank_is_named() -> None:
    assert named(rank(0, stack=IN_MODEL)) == (0,)
    assert named(rank(0, answers=False)) == (0,)


@pytest.mark.parametrize(("stack", "waits"), [(IN_COLLECTIVE, True), (IN_MODEL, False), ((), False)])
def test_a_rank_waits_if_its_innermost_frames_are_of_collectives(stack: tuple[str, ...], *, waits: bool) -> None:
    assert rank(0, stack=stack).waits == waits


def test_the_frames_of_a_dump_come_innermost_first() -> None:
    assert frames_of(DUMP) == ("/job/torchtitan_lite/trainer.py:221 in _train", "/job/train.py:8 in <module>")
    assert frames_of("") == ()


def test_the_report_names_rank_host_process_step_and_stack_in_80_columns() -> None:
    text = report(HangVerdict((1,), "is stopped (SIGSTOP, or a debugger)"), [rank(0), rank(1, stack=IN_MODEL)])
    assert text.splitlines() == [
        "Rank 1 hangs in step 5:",
        "  it is stopped (SIGSTOP, or a debugger)",
        "  host node1, process 7; last calls, innermost first:",
        "    models/llama/model.py:90 in forward",
        "    nn/modules/module.py:1790 in _call_impl",
        "    algorithms/_checkpoint/checkpoint_wrapper.py:170 in forward",
        "    distributed/pipelining/schedules.py:700 in step",
        "No step ended for 3.0 s; all ranks are killed, for the launcher to start",
    ]
    assert max(map(len, text.splitlines())) <= 80


def test_the_report_has_the_stacks_of_eight_ranks_at_most() -> None:
    found = [rank(number) for number in range(10)]
    text = report(HangVerdict(tuple(range(10)), "may hang"), found)
    assert (text.count("hangs in step"), "So does each of 2 more ranks" in text) == (8, True)


def test_the_report_names_a_rank_of_which_nothing_is_found() -> None:
    assert report(HangVerdict((1,), "is silent"), [rank(0)]).startswith("Rank 1 hangs:\n  it is silent\n")
