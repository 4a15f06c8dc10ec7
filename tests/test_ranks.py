"""The harness of tests that need ranks: a failing group is reported in time, and replaced."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Ranks, on_two_ranks


def sum_of_ranks(rank: int) -> int:
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    return int(total)


def dies_on_rank_1(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def raises_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("on purpose")
    dist.barrier()


@pytest.fixture
def word() -> str:
    return "a fixture"


@on_two_ranks
def test_a_case_runs_on_both_ranks_with_its_fixtures(rank: int, word: str) -> None:
    assert sum_of_ranks(rank) == 3
    assert word == "a fixture"


def test_a_rank_that_dies_is_reported_and_the_group_replaced(two_ranks: Ranks) -> None:
    reports = two_ranks.reports(dies_on_rank_1)
    assert reports[1].failure == "ended with exit code 7"
    assert reports[0].failure
    assert two_ranks.run(sum_of_ranks) == [3, 3]


@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_failed_is_ended(two_ranks: Ranks) -> None:
    reports = two_ranks.reports(raises_on_rank_1)
    assert "on purpose" in reports[1].failure
    assert "came to no end" in reports[0].failure


def process_of_sum(rank: int) -> tuple[int, int]:
    return os.getpid(), sum_of_ranks(rank)


def test_ranks_of_one_case_are_new_processes_for_the_next() -> None:
    ranks = Ranks(once=True)
    ran = [process for _ in range(2) for process in ranks.run(process_of_sum)]
    assert [total for _, total in ran] == [3] * 4
    assert len(dict(ran)) == 4
    for number, _ in ran:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)
