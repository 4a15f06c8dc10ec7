"""A run of 50 steps, exported for Hugging Face: transformers computes the same, whatever the run was split over."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.e2e import jobs
from tests.hugging_face import assert_same_function, our_model
from torchtitan_lite.cli.app import main
from torchtitan_lite.models.llama.args import FLAVORS

ARGS = dataclasses.replace(FLAVORS["debugmodel"], vocab_size=258, max_seq_len=64)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.slow  # trains 50 steps, on up to four ranks
@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        (1, []),
        pytest.param(2, [], marks=pytest.mark.exhaustive),
        pytest.param(4, ["--parallelism.tensor_parallel_degree=2"], marks=pytest.mark.exhaustive),
        (2, ["--parallelism.pipeline_parallel_degree=2"]),
    ],
    ids=["1 process", "FSDP 2", "TP 2 x FSDP 2", "PP 2"],
)
def test_transformers_computes_what_the_trained_model_does(ranks: int, degrees: list[str], tmp_path: Path) -> None:
    jobs.run(tmp_path / "run", "--training.steps=50", *degrees, ranks=ranks)
    step = tmp_path / "run" / "checkpoint" / "step-50"
    for dtype in ("float32", "bfloat16"):
        out = tmp_path / dtype
        shards = ["--max-shard-size", "600KB"] if dtype == "bfloat16" else []
        assert main(["export", str(step), str(out), "--format", "hf", "--dtype", dtype, *shards]) == 0
        assert_same_function(our_model(step, ARGS, getattr(torch, dtype)), out)
