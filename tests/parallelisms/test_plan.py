"""Which rank holds which layers, and what is refused before a model is built."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from torchtitan_lite.config.job_config import JobConfig, Parallelism, Training
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models.llama.args import ModelArgs
from torchtitan_lite.models.llama.model import Transformer
from torchtitan_lite.parallelisms.pipeline_llama import cut_to_stage
from torchtitan_lite.parallelisms.plan import Plan, build_plan

ARGS = ModelArgs(dim=32, n_layers=8, n_heads=4, n_kv_heads=2, vocab_size=50, ffn_dim=88)


def plan(
    world_size: int,
    *,
    batch_size: int = 4,
    dtype: Any = "float32",
    compiled: bool = False,
    args: ModelArgs = ARGS,
    **parallelism: Any,
) -> Plan:
    training = Training(batch_size=batch_size, mixed_precision_param=dtype, seq_len=30, compile=compiled)
    return build_plan(JobConfig(training=training, parallelism=Parallelism(**parallelism)), args, world_size)


def layers(of: Plan) -> list[list[int]]:
    return [list(stage.layers) for stage in of.stages]


def test_without_a_pipeline_there_is_one_stage_with_all_layers() -> None:
    found = plan(2)
    assert layers(found) == [list(range(8))]
    assert found.stages_of(0) == found.stages_of(1) == found.stages
    assert found.stages[0].is_first and found.stages[0].is_last


def test_layers_are_split_as_evenly_as_possible_and_the_ends_get_fewer() -> None:
    assert layers(plan(2, pipeline_parallel_degree=2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layers(plan(3, pipeline_parallel_degree=3)) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [len(held) for held in layers(plan(6, pipeline_parallel_degree=6, batch_size=6))] == [1, 2, 2, 1, 1, 1]


def test_the_interleaved_schedule_gives_each_rank_every_pp_th_stage() -> None:
    found = plan(4, pipeline_parallel_degree=2, pipeline_parallel_schedule="Interleaved1F1B")
    assert layers(found) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [[stage.index for stage in found.stages_of(rank)] for rank in range(4)] == [[0, 2], [0, 2], [1, 3], [1, 3]]


def test_split_points_are_the_first_layers_of_the_stages_after_the_first() -> None:
    found = plan(2, pipeline_parallel_degree=2, pipeline_parallel_split_points=("layers.5",))
    assert layers(found) == [[0, 1, 2, 3, 4], [5, 6, 7]]


def test_the_stages_together_have_the_parameters_of_the_model_under_their_own_names() -> None:
    with torch.device("meta"):
        whole = dict(Transformer(ARGS).named_parameters())
        parts = []
        for stage in plan(3, pipeline_parallel_degree=3).stages:
            part = Transformer(ARGS)
            cut_to_stage(part, stage)
            parts.append(dict(part.named_parameters()))
    assert [fqn for part in parts for fqn in part] == list(whole)
    assert all(part[fqn].shape == whole[fqn].shape for part in parts for fqn in part)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, 6), ({"pipeline_parallel_microbatch_size": 3}, 2), ({"pipeline_parallel_microbatches": 3}, 3)],
)
def test_a_local_batch_is_split_by_the_size_or_the_number_of_micro_batches(
    settings: dict[str, Any], expected: int
) -> None:
    assert plan(2, pipeline_parallel_degree=2, batch_size=6, **settings).num_microbatches == expected


@pytest.mark.parametrize(
    ("world_size", "settings", "message"),
    [
        (4, {"tensor_parallel_degree": 4}, "tensor_parallel_degree: expected a divisor of the model's n_kv_heads 2"),
        (2, {"tensor_parallel_degree": 2, "compiled": True}, "training.compile: blocks that tensor parallelism splits"),
        (
            2,
            {"pipeline_parallel_degree": 2, "args": dataclasses.replace(ARGS, tie_word_embeddings=True)},
            "the embeddings of this model are tied, and the first and the last stage cannot have one parameter",
        ),
        (2, {"pipeline_parallel_degree": 2, "dtype": "float16"}, "float16 needs a gradient scaler"),
        (9, {"pipeline_parallel_degree": 9}, "8 layers are too few for 9 stages"),
        (2, {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 3}, r"\(1, 2, 4\), found 3"),
        (2, {"pipeline_parallel_degree": 2, "batch_size": 1}, "1F1B over 2 ranks needs at least 2 micro-batches"),
        (
            2,
            {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B", "batch_size": 3},
            "needs a multiple of 2 micro-batches, found 3",
        ),
        (2, {"pipeline_parallel_degree": 2, "pipeline_parallel_split_points": ("norm",)}, "found 'norm'"),
        (2, {"pipeline_parallel_degree": 2, "pipeline_parallel_split_points": ("layers.8",)}, "to layers.7, found"),
        (
            2,
            {"pipeline_parallel_degree": 2, "pipeline_parallel_split_points": ("layers.2", "layers.4")},
            "2 points for 3 stages; 1F1B with pipeline_parallel_degree 2 needs 2",
        ),
        (
            3,
            {"pipeline_parallel_degree": 3, "pipeline_parallel_split_points": ("layers.4", "layers.2")},
            "layers.4,layers.2 are not in ascending order",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_the_key(
    world_size: int, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(world_size, **settings)
