"""Every topology starts from the parameters of one process and takes its first step."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.ranks import Ranks
from torchtitan_lite.config.job_config import JobConfig, Parallelism, Training
from torchtitan_lite.distributed.reduce import mean_over_ranks
from torchtitan_lite.models.llama.args import ModelArgs
from torchtitan_lite.models.llama.model import Transformer
from torchtitan_lite.optim import clip_grad_norm_
from torchtitan_lite.parallelisms.forward_backward import build_forward_backward
from torchtitan_lite.parallelisms.parallelize_llama import parallelize_llama
from torchtitan_lite.parallelisms.pipeline_llama import Stage, cut_to_stage
from torchtitan_lite.parallelisms.plan import Plan, build_plan

# 51 tokens: neither the embedding nor the output is split evenly.
ARGS = ModelArgs(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=51, ffn_dim=88, max_seq_len=16)
TIED = dataclasses.replace(ARGS, tie_word_embeddings=True)
CPU = torch.device("cpu")
Topology = tuple[int, dict[str, Any], ModelArgs]
GLOBAL_BATCH_SIZE = 8
MAX_NORM = 0.01

TWO_RANKS: dict[str, dict[str, Any]] = {
    "FSDP 2": {},
    "DDP 2": {"data_parallel_replicate_degree": 2},
    "TP 2": {"tensor_parallel_degree": 2},
    "PP 2, 1F1B": {"pipeline_parallel_degree": 2},
    "PP 2, GPipe": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "GPipe"},
    "PP 2, interleaved": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"},
}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "FSDP 4": {},
    "HSDP 2 x 2": {"data_parallel_replicate_degree": 2},
    "TP 2 x FSDP 2": {"tensor_parallel_degree": 2},
    "PP 2 x FSDP 2": {"pipeline_parallel_degree": 2},
    "PP 2 x DDP 2": {"pipeline_parallel_degree": 2, "data_parallel_replicate_degree": 2},
    "PP 2 x FSDP 2, interleaved": TWO_RANKS["PP 2, interleaved"],
    "PP 2 x TP 2": {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2},
    "PP 2 x TP 2, interleaved": TWO_RANKS["PP 2, interleaved"] | {"tensor_parallel_degree": 2},
}
TIED_ON_TWO = ("FSDP 2", "TP 2")
TIED_ON_FOUR = ("HSDP 2 x 2", "TP 2 x FSDP 2")
FAST = ("FSDP 2", "PP 2, interleaved")
WITH_ALL = (
    *TWO_RANKS,
    *("HSDP 2 x 2", "TP 2 x FSDP 2", "PP 2 x FSDP 2, interleaved", "PP 2 x TP 2", "TP 2, tied", "HSDP 2 x 2, tied"),
)


def _topology(name: str, *topology: Any) -> Any:
    kept = pytest.mark.slow if name in WITH_ALL else pytest.mark.exhaustive
    return pytest.param(topology, id=name, marks=() if name in FAST else kept)


TOPOLOGIES = [
    *(_topology(name, 2, settings, ARGS) for name, settings in TWO_RANKS.items()),
    *(_topology(f"{name}, tied", 2, TWO_RANKS[name], TIED) for name in TIED_ON_TWO),
    *(_topology(name, 4, settings, ARGS) for name, settings in FOUR_RANKS.items()),
    *(_topology(f"{name}, tied", 4, FOUR_RANKS[name], TIED) for name in TIED_ON_FOUR),
]


def first_step(rank: int, world_size: int, settings: dict[str, Any], args: ModelArgs) -> dict[str, Any]:
    """Return what this rank has before, during and after one step, as whole plain tensors and numbers."""
    training = Training(batch_size=2, seq_len=16, mixed_precision_param="float32")
    config = JobConfig(training=training, parallelism=Parallelism(**settings))
    plan = build_plan(config, args, world_size)
    mesh: Any = plan.dims.build_mesh("cpu") if world_size > 1 else None
    stages = plan.stages_of(rank)
    parts = [build_part(args, stage, plan, mesh, config) for stage in stages]
    seen: dict[str, Any] = {
        "names": [fqn for part in parts for fqn in get_model_state_dict(part)],
        "initial": whole({fqn: value for part in parts for fqn, value in part.named_parameters()}),
    }
    share = batch().chunk(plan.dims.dp_degree)[plan.dims.dp_rank(rank)].unflatten(0, (-1, training.batch_size))
    forward_backward = build_forward_backward(
        config,
        plan,
        args,
        parts,
        mesh,
        rank=rank,
        accumulation=len(share),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        timer=lambda name: nullcontext(),
        device=CPU,
    )
    seen["loss"] = mean_over_ranks(forward_backward(share), CPU).item()
    seen["gradients"] = gradients(parts)
    pipeline = mesh.get_group("pp") if plan.dims.pp > 1 else None
    seen["norm"] = clip_grad_norm_(parts, MAX_NORM, pipeline=pipeline).item()
    seen["clipped"] = clip_grad_norm_(parts, MAX_NORM, pipeline=pipeline).item()
    return seen


def build_part(args: ModelArgs, stage: Stage, plan: Plan, mesh: DeviceMesh, config: JobConfig) -> Transformer:
    with torch.device("meta"):
        model = Transformer(args)
    cut_to_stage(model, stage)
    parallelize_llama(model, mesh, plan.dims, config)
    model.to_empty(device=CPU)
    model.init_weights(3)
    return model


def batch() -> Tensor:
    return torch.randint(0, 51, (GLOBAL_BATCH_SIZE, 17), generator=torch.Generator().manual_seed(0))


def gradients(parts: list[Transformer]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for part in parts:
        for fqn, parameter in part.named_parameters():
            assert parameter.grad is not None, fqn
            found[fqn] = parameter.grad
    return whole(found)


def whole(tensors: dict[str, Tensor] | dict[str, nn.Parameter]) -> dict[str, Tensor]:
    result = {}
    for name, tensor in tensors.items():
        plain = name.replace("_checkpoint_wrapped_module.", "")
        result[plain] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
    return result


@pytest.fixture(scope="module", params=TOPOLOGIES)
def topology(request: pytest.FixtureRequest) -> Topology:
    """The number of ranks, the degrees, and the model."""
    found: Topology = request.param
    return found


@pytest.fixture(scope="module")
def one_process(topology: Topology) -> dict[str, Any]:
    """The results of one plain process with the same model."""
    return first_step(0, 1, {}, topology[2])


@pytest.fixture(scope="module")
def ranks(topology: Topology) -> list[dict[str, Any]]:
    """The results of each rank of a topology.

    In new processes: in ranks that had run other cases and destroyed their groups, torch's all-gather once ended with
    a damaged heap.
    """
    world_size, settings, args = topology
    alone = Ranks(world_size, once=True)
    found: list[dict[str, Any]] = alone.run(first_step, world_size=world_size, settings=settings, args=args)
    return found


@pytest.mark.slow
def test_the_initial_model_is_bitwise_that_of_one_process(
    ranks: list[dict[str, Any]], one_process: dict[str, Any]
) -> None:
    for seen in ranks:
        assert seen["initial"]
        assert all(torch.equal(value, one_process["initial"][fqn]) for fqn, value in seen["initial"].items())


@pytest.mark.slow
def test_the_ranks_together_have_the_names_of_the_plain_model(
    ranks: list[dict[str, Any]], one_process: dict[str, Any]
) -> None:
    assert {name for seen in ranks for name in seen["names"]} == set(one_process["names"])


def test_the_loss_is_that_of_one_process_on_every_rank(
    ranks: list[dict[str, Any]], one_process: dict[str, Any]
) -> None:
    assert len({seen["loss"] for seen in ranks}) == 1
    assert ranks[0]["loss"] == pytest.approx(one_process["loss"], rel=1e-5)


def test_the_gradients_are_those_of_one_process(ranks: list[dict[str, Any]], one_process: dict[str, Any]) -> None:
    for seen in ranks:
        for fqn, gradient in seen["gradients"].items():
            torch.testing.assert_close(gradient, one_process["gradients"][fqn], rtol=1e-4, atol=1e-6)


def test_the_norm_is_that_of_all_gradients_on_every_rank_and_all_are_clipped_by_it(
    ranks: list[dict[str, Any]], one_process: dict[str, Any]
) -> None:
    assert len({seen["norm"] for seen in ranks}) == 1
    assert ranks[0]["norm"] == pytest.approx(one_process["norm"], rel=1e-5)
    assert all(seen["clipped"] == pytest.approx(MAX_NORM, rel=1e-3) for seen in ranks)
