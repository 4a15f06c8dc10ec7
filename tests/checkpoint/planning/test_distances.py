"""How far the values of two ranks are apart, and the sample that is compared."""

from __future__ import annotations

import math

import pytest
import torch

from torchtitan_lite.checkpoint.planning.distances import squares
from torchtitan_lite.checkpoint.planning.rank_comparison import _sampled_elements

NAN = math.nan


@pytest.mark.parametrize(("mine", "theirs"), [([NAN, 1.0], [2.0, 1.0]), ([2.0, 1.0], [NAN, 1.0])])
def test_nan_on_one_rank_alone_is_a_difference(mine: list[float], theirs: list[float]) -> None:
    difference, *_ = squares(*(torch.tensor(each).view(torch.uint8) for each in (mine, theirs)), torch.float32)
    assert math.isnan(difference)


def test_nan_on_both_ranks_is_none() -> None:
    mine, theirs = torch.tensor([NAN, 1.0, 5.0]), torch.tensor([NAN, 1.0, 3.0])
    assert squares(mine.view(torch.uint8), theirs.view(torch.uint8), torch.float32) == (4.0, 26.0, 10.0)


@pytest.mark.parametrize("num_bytes", [4, 400, 4000])
def test_of_memory_that_is_not_contiguous_the_sample_has_about_the_bytes_that_it_should(num_bytes: int) -> None:
    memory = torch.arange(10_000.0).reshape(100, 100).t()
    sample = _sampled_elements(memory, num_bytes)
    assert num_bytes // 2 <= sample.numel() * 4 <= num_bytes
    assert {*sample.tolist()} <= {*memory.reshape(-1).tolist()}
    assert sample[0] == memory[0, 0]


@pytest.mark.parametrize("num_bytes", [1, 256, 40_000])
def test_of_contiguous_memory_it_has_lines_of_the_processors_cache(num_bytes: int) -> None:
    memory = torch.arange(10_000.0)
    sample = _sampled_elements(memory, num_bytes)
    assert sample.shape[1] == 64 // 4
    assert sample.numel() * 4 == pytest.approx(max(64, num_bytes), rel=0.02)
