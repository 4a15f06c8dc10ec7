"""Activation checkpointing, compilation and the choice of sharding, on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.utils.flop_counter import FlopCounterMode

from torchtitan_lite.config.job_config import ActivationCheckpoint, JobConfig, Model, Training
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models.llama.args import ModelArgs
from torchtitan_lite.models.llama.model import Transformer
from torchtitan_lite.parallelisms.parallel_dims import ParallelDims
from torchtitan_lite.parallelisms.parallelize_llama import parallelize_llama

AC_MODES = [("none", "2"), ("selective", "1"), ("selective", "2"), ("selective", "op"), ("full", "2")]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of only this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ParallelDims().build_mesh("cpu")
    dist.destroy_process_group()


def job(mode: Any = "none", option: str = "2", dropout: float = 0.0, **training: Any) -> JobConfig:
    return JobConfig(
        model=Model(dropout=dropout),
        training=Training(**{"mixed_precision_param": "float32"} | training),
        activation_checkpoint=ActivationCheckpoint(mode=mode, selective_ac_option=option),
    )


def build(config: JobConfig, mesh: DeviceMesh | None = None) -> Transformer:
    args = ModelArgs(
        dim=32, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=50, ffn_dim=88, dropout=config.model.dropout
    )
    with torch.device("meta"):
        model = Transformer(args)
    parallelize_llama(model, mesh, ParallelDims(), config)  # type: ignore[arg-type]  # a plain module needs no mesh
    model.to_empty(device="cpu")
    model.init_weights(0)
    return model


def gradients(model: Transformer) -> list[Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (2, 16))
    model(tokens).float().logsumexp(-1).mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("mode", "option"), AC_MODES)
def test_wrappers_do_not_change_the_names_in_a_checkpoint(mode: str, option: str, compiled: bool) -> None:
    found = get_model_state_dict(build(job(mode, option, compile=compiled)))
    assert list(found) == list(build(job()).state_dict())


@pytest.mark.parametrize(("mode", "option"), AC_MODES)
def test_wrappers_do_not_change_the_initial_parameters(mode: str, option: str) -> None:
    plain = build(job()).state_dict()
    found = get_model_state_dict(build(job(mode, option)))
    assert all(torch.equal(found[fqn], plain[fqn]) for fqn in plain)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(("mode", "option"), AC_MODES[1:])
def test_recomputing_activations_changes_no_gradient(mode: str, option: str, dropout: float) -> None:
    kept, recomputed = gradients(build(job(dropout=dropout))), gradients(build(job(mode, option, dropout)))
    assert len(kept) == len(recomputed)
    assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))


def test_every_nth_block_is_recomputed() -> None:
    layers = build(job("selective", "2")).layers
    wrapped = [number for number, block in layers.items() if "CheckpointWrapper" in type(block).__name__]
    assert wrapped == ["1", "3"]


def test_the_op_option_recomputes_only_cheap_operators() -> None:
    none, some, every = (operations(build(job(*mode))) for mode in [AC_MODES[0], AC_MODES[3], AC_MODES[4]])
    assert none < some < every


def operations(model: Transformer) -> int:
    """Return the floating-point operations of matmuls and attention, in forward and backward."""
    with FlopCounterMode(display=False) as counter:
        gradients(model)
    return counter.get_total_flops()


def test_one_rank_in_float32_is_a_plain_module(mesh: DeviceMesh) -> None:
    assert not isinstance(build(job(), mesh), FSDPModule)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_rank_in_mixed_precision_computes_as_many_ranks_do(dtype: str, mesh: DeviceMesh) -> None:
    model = build(job(mixed_precision_param=dtype), mesh)
    assert isinstance(model, FSDPModule)
    assert model(torch.zeros(1, 4, dtype=torch.int64)).dtype == getattr(torch, dtype)
    assert all(gradient.dtype == torch.float32 for gradient in gradients(model))


def test_offload_without_an_accelerator_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(ConfigError, match="enable_cpu_offload: expected an accelerator"):
        build(job(enable_cpu_offload=True), mesh)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own warnings, which differ between versions
def test_compiled_blocks_compute_the_same_and_are_compiled_once(mesh: DeviceMesh) -> None:
    torch._dynamo.reset()
    config: dict[str, Any] = {"mixed_precision_param": "bfloat16"}
    plain, compiled = (build(job(**config, compile=on), mesh) for on in (False, True))
    tokens = torch.randint(0, 50, (2, 16))
    torch.testing.assert_close(compiled(tokens), plain(tokens), rtol=0.02, atol=0.02)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
