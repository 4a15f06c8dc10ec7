"""The trace of samples, over restarts and changes of the number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchtitan_lite.metrics.sample_trace import SampleTrace

BATCH = 12


def run_steps(
    folder: Path, steps: range, *, num_ranks: int = 1, loaded_step: int = 0, mute: tuple[int, ...] = ()
) -> None:
    """Trace the `steps` of a job with `num_ranks` ranks that share batches of 12; those in `mute` do not write."""
    traces = [SampleTrace(folder, rank=rank, writes=rank not in mute) for rank in range(num_ranks)]
    for trace in traces:
        trace.start(loaded_step)
    share = BATCH // num_ranks
    for step in steps:
        for rank, trace in enumerate(traces):
            first = (step - 1) * BATCH + rank * share
            trace.log(step, range(first, first + share))
    for trace in traces:
        trace.close()


def traced(folder: Path) -> list[tuple[int, int]]:
    """Return every (step, index) on file, sorted."""
    return sorted(
        (record["step"], index)
        for path in (folder / "samples").glob("rank*.jsonl")
        for record in map(json.loads, path.read_text().splitlines())
        for index in record["indices"]
    )


def expected(last_step: int) -> list[tuple[int, int]]:
    return [(index // BATCH + 1, index) for index in range(last_step * BATCH)]


def test_a_line_is_the_step_and_its_positions(tmp_path: Path) -> None:
    trace = SampleTrace(tmp_path, rank=3, writes=True)
    trace.start(0)
    trace.log(1, range(4, 7))
    # read while the run continues: nothing waits in a buffer
    assert (tmp_path / "samples" / "rank3.jsonl").read_text() == '{"step": 1, "indices": [4, 5, 6]}\n'
    trace.close()


def test_each_rank_writes_a_file_of_its_own(tmp_path: Path) -> None:
    run_steps(tmp_path, range(1, 4), num_ranks=3)
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [f"rank{rank}.jsonl" for rank in range(3)]
    assert traced(tmp_path) == expected(3)


def test_a_rank_that_does_not_write_leaves_nothing(tmp_path: Path) -> None:
    run_steps(tmp_path, range(1, 3), num_ranks=2, mute=(0, 1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("degrees", [(2, 4, 1), (4, 2, 1, 2, 4), (2, 3)])
def test_over_restarts_on_other_ranks_every_sample_is_traced_once(tmp_path: Path, degrees: tuple[int, ...]) -> None:
    for start, num_ranks in enumerate(degrees):
        # Each is killed two steps after its checkpoint; the next one continues from there.
        first = 3 * start
        run_steps(tmp_path, range(first + 1, first + 6), num_ranks=num_ranks, loaded_step=first)
    assert traced(tmp_path) == expected(3 * len(degrees) + 2)


def test_later_lines_are_dropped_from_the_files_of_ranks_that_no_longer_exist(tmp_path: Path) -> None:
    run_steps(tmp_path, range(1, 6), num_ranks=4)
    run_steps(tmp_path, range(4, 4), num_ranks=1, loaded_step=3)
    assert traced(tmp_path) == expected(3)


def test_rank_0_drops_later_lines_even_if_it_does_not_write(tmp_path: Path) -> None:
    run_steps(tmp_path, range(1, 6), num_ranks=2)
    run_steps(tmp_path, range(3, 3), num_ranks=2, loaded_step=2, mute=(0,))
    assert traced(tmp_path) == expected(2)


def test_another_rank_drops_nothing(tmp_path: Path) -> None:
    run_steps(tmp_path, range(1, 6), num_ranks=2)
    SampleTrace(tmp_path, rank=1, writes=True).start(2)
    assert traced(tmp_path) == expected(5)


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    run_steps(tmp_path, range(1, 3))
    with (tmp_path / "samples" / "rank0.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "indi')
    run_steps(tmp_path, range(3, 5), loaded_step=2)
    assert traced(tmp_path) == expected(4)


def test_a_fresh_start_moves_the_traces_of_all_ranks_aside(tmp_path: Path) -> None:
    run_steps(tmp_path, range(1, 3), num_ranks=2)
    run_steps(tmp_path, range(1, 2), num_ranks=1)
    run_steps(tmp_path, range(1, 2), num_ranks=1)
    names = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert names == ["rank0.jsonl", "rank0.jsonl.1", "rank0.jsonl.2", "rank1.jsonl.1"]
    assert traced(tmp_path) == expected(1)


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    trace = SampleTrace(tmp_path, rank=0, writes=True)
    trace.log(1, range(2))
    trace.close()
    trace.close()
    assert len((tmp_path / "samples" / "rank0.jsonl").read_text().splitlines()) == 1
