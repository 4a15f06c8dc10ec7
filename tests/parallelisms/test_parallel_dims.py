"""Degrees of parallelism, as arithmetic."""

from __future__ import annotations

import pytest

from torchtitan_lite.config.job_config import Parallelism
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.parallelisms.parallel_dims import ParallelDims, build_parallel_dims


def degrees(*, replicate: int = 1, shard: int = -1, tp: int = 1, pp: int = 1) -> Parallelism:
    return Parallelism(
        data_parallel_replicate_degree=replicate,
        data_parallel_shard_degree=shard,
        tensor_parallel_degree=tp,
        pipeline_parallel_degree=pp,
    )


@pytest.mark.parametrize(
    ("config", "world_size", "expected"),
    [
        (degrees(), 1, ParallelDims()),
        (degrees(), 4, ParallelDims(dp_shard=4)),
        (degrees(replicate=2), 2, ParallelDims(dp_replicate=2)),
        (degrees(replicate=2), 4, ParallelDims(dp_replicate=2, dp_shard=2)),
        (degrees(pp=2, tp=2), 8, ParallelDims(pp=2, dp_shard=2, tp=2)),
        (degrees(pp=2, shard=3), 6, ParallelDims(pp=2, dp_shard=3)),
    ],
)
def test_minus_one_shards_over_the_remaining_ranks(
    config: Parallelism, world_size: int, expected: ParallelDims
) -> None:
    dims = build_parallel_dims(config, world_size)
    assert dims == expected
    assert dims.world_size == world_size


@pytest.mark.parametrize(
    ("config", "world_size", "arithmetic"),
    [
        (
            degrees(pp=2, shard=2, tp=2),
            4,
            "pp 2 x dp_replicate 1 x dp_shard 2 x tp 2 = 8, but this job has 4 processes",
        ),
        (degrees(shard=2), 1, "pp 1 x dp_replicate 1 x dp_shard 2 x tp 1 = 2, but this job has 1 process;"),
        (degrees(shard=1), 2, "pp 1 x dp_replicate 1 x dp_shard 1 x tp 1 = 1, but this job has 2 processes"),
        (degrees(pp=2), 3, "pp 2 x dp_replicate 1 x tp 1 = 2, which does not divide this job's 3 processes"),
    ],
)
def test_a_wrong_product_is_one_sentence_with_the_arithmetic(
    config: Parallelism, world_size: int, arithmetic: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_parallel_dims(config, world_size)
    assert arithmetic in str(caught.value)
    assert str(caught.value).count(". ") == 0


def test_only_degrees_above_one_are_named() -> None:
    assert str(ParallelDims(pp=2, dp_shard=2)) == "pp 2 x dp_shard 2"
    assert str(ParallelDims(dp_replicate=2, dp_shard=2, tp=4)) == "dp_replicate 2 x dp_shard 2 x tp 4"
    assert str(ParallelDims()) == "1 process"


def test_ranks_that_share_a_model_take_the_same_data_and_all_others_different_data() -> None:
    dims = ParallelDims(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    assert [dims.dp_rank(rank) for rank in range(16)] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert [dims.pp_rank(rank) for rank in range(16)] == [0] * 8 + [1] * 8
    assert dims.dp_degree == 4
