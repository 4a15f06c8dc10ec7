"""Scalars over ranks."""

import math

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_two_ranks
from torchtitan_lite.distributed.reduce import max_over_ranks, mean_over_ranks, norm_over_group


@on_two_ranks
def test_mean_and_maximum_are_the_same_on_all_ranks_and_change_no_argument(rank: int) -> None:
    mine = torch.tensor(float(rank + 1))
    assert mean_over_ranks(mine).item() == 1.5
    assert max_over_ranks(mine).item() == 2.0
    assert mine.item() == rank + 1


@on_two_ranks
def test_a_value_that_is_not_finite_on_one_rank_is_not_finite_on_all(rank: int) -> None:
    for value in (math.nan, math.inf, -math.inf):
        assert not math.isfinite(mean_over_ranks(torch.tensor(value if rank == 1 else 1.0)).item())


@on_two_ranks
def test_a_rank_without_a_value_gets_the_result_of_the_others(rank: int) -> None:
    mine = torch.tensor(3.0) if rank == 1 else None
    assert mean_over_ranks(mine).item() == max_over_ranks(mine).item() == 3.0


@on_two_ranks
def test_the_norm_over_a_group_is_right_where_a_float32_square_overflows(rank: int) -> None:
    assert norm_over_group(torch.tensor([3.0, 4.0][rank]), dist.group.WORLD).item() == 5.0
    assert norm_over_group(torch.tensor([3e30, 4e30][rank]), dist.group.WORLD).item() == pytest.approx(5e30)
    assert math.isnan(norm_over_group(torch.tensor([math.nan, 1.0][rank]), dist.group.WORLD).item())


def test_without_a_group_a_scalar_is_its_own_mean_and_maximum() -> None:
    assert mean_over_ranks(torch.tensor(3.0)).item() == max_over_ranks(torch.tensor(3.0)).item() == 3.0
