"""What a dry run says that the largest rank holds is what the largest of all ranks holds."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpoint.format.shards import box_of
from torchtitan_lite.config.job_config import JobConfig, Model, Parallelism, Training
from torchtitan_lite.distributed.process_group import init_simulated_ranks
from torchtitan_lite.models.llama.config_file import build_model_args
from torchtitan_lite.models.llama.model import Transformer, num_params
from torchtitan_lite.parallelisms.footprint import footprint, held_parameters
from torchtitan_lite.parallelisms.parallelize_llama import parallelize_llama
from torchtitan_lite.parallelisms.pipeline_llama import Stage, cut_to_stage
from torchtitan_lite.parallelisms.plan import build_plan


@pytest.fixture
def simulated() -> Iterator[None]:
    init_simulated_ranks(12)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("simulated")
def test_the_largest_rank_is_the_largest_of_all_ranks() -> None:
    parallelism = Parallelism(tensor_parallel_degree=2, pipeline_parallel_degree=2)
    config = JobConfig(
        model=Model(flavor="debugmodel"), training=Training(batch_size=2, seq_len=64), parallelism=parallelism
    )
    args = build_model_args(config.model, vocab_size=258, seq_len=64)
    plan = build_plan(config, args, 12)
    mesh = plan.dims.build_mesh("cpu")
    built: list[nn.Module] = []

    def whole() -> Transformer:
        with torch.device("meta"):
            return Transformer(args)

    def build_part(stage: Stage) -> nn.Module:
        model = whole()
        cut_to_stage(model, stage)
        parallelize_llama(model, mesh, plan.dims, config)
        built.append(model)
        return model

    held, total = held_parameters(plan, build_part), num_params(whole())
    assert held == [max(_held_by_each(model)) for model in built]
    assert [min(_held_by_each(model)) for model in built] != held
    # Norms are on both ranks of tensor parallelism, all else is on one rank: the sum counts nothing else twice.
    norms = sum(p.numel() for model in built for name, p in model.named_parameters() if "norm" in name)
    assert sum(sum(_held_by_each(model)) for model in built) == total + norms
    lines = footprint(plan, held, config.training, 6, total).splitlines()
    assert lines[0] == "The plan fits 12 ranks (pp 2 x dp_shard 3 x tp 2):"
    assert max(map(len, lines)) <= 80


def _held_by_each(model: nn.Module) -> list[int]:
    """Return the elements of `model` that each rank of its mesh of 3 x 2 holds."""
    total = dict.fromkeys([(shard, tp) for shard in range(3) for tp in range(2)], 0)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        shape, mesh = tuple(parameter.shape), tuple(parameter.device_mesh.shape)
        for coordinate in total:
            at = coordinate if len(mesh) == 2 else coordinate[:1]
            total[coordinate] += math.prod(box_of(shape, mesh, parameter.placements, at).sizes)
    return list(total.values())
