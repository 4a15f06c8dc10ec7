"""Two ranks with FSDP hold and compute the same as one plain process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.ranks import Ranks
from torchtitan_lite.config.job_config import ActivationCheckpoint, JobConfig, Optimizer, Training
from torchtitan_lite.models.init import Normal, init_parameters
from torchtitan_lite.models.llama.args import ModelArgs
from torchtitan_lite.models.llama.model import Transformer, num_params
from torchtitan_lite.optim import build_optimizers, clip_grad_norm_
from torchtitan_lite.parallelisms.parallel_dims import ParallelDims
from torchtitan_lite.parallelisms.parallelize_llama import parallelize_llama

# 51 tokens and 5 heads of 6: no first dimension but the feed-forward's is even.
ARGS = ModelArgs(dim=30, n_layers=2, n_heads=5, n_kv_heads=1, vocab_size=51, ffn_dim=80, max_seq_len=16)
SEED = 3
SPLITS = [(5, 7, 1), (1, 7, 0), (3, 1, 1)]  # rows, columns, dim; some leave a rank without elements


def job(dtype: str = "float32", ac: str = "none") -> JobConfig:
    training: Any = Training(mixed_precision_param=dtype)  # type: ignore[arg-type]  # a parameter of the tests
    return JobConfig(training=training, activation_checkpoint=ActivationCheckpoint(mode=ac))  # type: ignore[arg-type]


def build(mesh: DeviceMesh | None, config: JobConfig) -> Transformer:
    with torch.device("meta"):
        model = Transformer(ARGS)
    if mesh is not None:
        parallelize_llama(model, mesh, ParallelDims(dp_shard=mesh.size()), config)
    model.to_empty(device="cpu")
    model.init_weights(SEED)
    return model


def batch() -> Tensor:
    return torch.randint(0, 51, (4, 17), generator=torch.Generator().manual_seed(0))


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1).float(), windows[:, 1:].flatten())


def trained(model: Transformer, windows: Tensor) -> dict[str, Any]:
    """Train one step. Return its figures as plain tensors and numbers."""
    seen: dict[str, Any] = {"params": num_params(model), "initial": whole(model, lambda p: p)}
    optimizers = build_optimizers([model], Optimizer())
    loss = loss_of(model, windows)
    loss.backward()  # type: ignore[no-untyped-call]  # torch's gap
    seen |= {"loss": loss.item(), "gradients": whole(model, lambda p: p.grad)}
    seen["norm"] = clip_grad_norm_([model], 0.01)
    seen["clipped"] = clip_grad_norm_([model], 0.01)
    for optimizer in optimizers:
        optimizer.step()
    return seen | {"updated": whole(model, lambda p: p), "loss after": loss_of(model, windows).item()}


def whole(model: nn.Module, of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
    """Return one tensor of each parameter, gathered from all ranks."""
    result = {}
    for fqn, parameter in model.named_parameters():
        value = of(parameter)
        assert value is not None, fqn
        result[fqn.replace("_checkpoint_wrapped_module.", "")] = full(value).detach().clone()
    return result


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def split(mesh: DeviceMesh, rows: int, columns: int, dim: int) -> Tensor:
    """Return the initial values of a parameter that is split along `dim`."""
    model = nn.Linear(columns, rows, bias=False)
    model.weight = nn.Parameter(distribute_tensor(torch.empty(rows, columns), mesh, [Shard(dim)]))
    init_parameters(model, SEED, lambda fqn: Normal(std=1.0))
    return full(model.weight).detach()


def train_in_several_ways(rank: int) -> dict[str, Any]:
    """Return the results by the name of the way; "split" has initial values of unevenly split parameters."""
    mesh = ParallelDims(dp_shard=2).build_mesh("cpu")
    mine = batch().chunk(2)[rank]
    seen: dict[str, Any] = {
        "split": {f"{rows} {columns} {dim}": split(mesh, rows, columns, dim) for rows, columns, dim in SPLITS}
    }
    for name, config in {
        "float32": job(),
        "float32, full": job(ac="full"),
        "bfloat16": job("bfloat16"),
        "bfloat16, selective": job("bfloat16", "selective"),
    }.items():
        model = build(mesh, config)
        seen[name] = trained(model, mine) | {"fqns": list(get_model_state_dict(model))}
    return seen


@pytest.fixture(scope="module")
def ranks(two_ranks: Ranks) -> list[dict[str, Any]]:
    """The results of each of two ranks."""
    return two_ranks.run(train_in_several_ways)


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The results of one process that trains on the batches of both."""
    return trained(build(None, job()), batch())


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for fqn in expected:
        torch.testing.assert_close(found[fqn], expected[fqn], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_initial_parameters_are_bitwise_those_of_one_process(
    ranks: list[dict[str, Any]], plain: dict[str, Any]
) -> None:
    for way in ("float32", "float32, full", "bfloat16", "bfloat16, selective"):
        found = ranks[0][way]["initial"]
        assert found.keys() == plain["initial"].keys()
        assert all(torch.equal(found[fqn], plain["initial"][fqn]) for fqn in found), way


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "columns", "dim"), SPLITS)
def test_any_split_is_bitwise_that_of_one_process(
    ranks: list[dict[str, Any]], rows: int, columns: int, dim: int
) -> None:
    whole = nn.Linear(columns, rows, bias=False)
    init_parameters(whole, SEED, lambda fqn: Normal(std=1.0))
    assert all(torch.equal(rank["split"][f"{rows} {columns} {dim}"], whole.weight) for rank in ranks)


def test_parameters_are_counted_over_all_ranks(ranks: list[dict[str, Any]], plain: dict[str, Any]) -> None:
    assert ranks[0]["float32"]["params"] == ranks[1]["float32"]["params"] == plain["params"]


def test_a_step_on_two_ranks_is_the_step_of_one_process(ranks: list[dict[str, Any]], plain: dict[str, Any]) -> None:
    losses = [seen["float32"]["loss"] for seen in ranks]
    assert sum(losses) / 2 == pytest.approx(plain["loss"], rel=1e-6)
    assert_close(ranks[0]["float32"]["gradients"], plain["gradients"])
    assert_close(ranks[0]["float32"]["updated"], plain["updated"])


def test_the_gradient_norm_is_the_same_plain_number_on_all_ranks(
    ranks: list[dict[str, Any]], plain: dict[str, Any]
) -> None:
    norms = [seen["float32"]["norm"] for seen in ranks]
    assert type(norms[0]) is Tensor and norms[0].shape == ()
    assert norms[0].item() == norms[1].item() == pytest.approx(plain["norm"].item(), rel=1e-5)
    assert ranks[0]["float32"]["clipped"].item() == pytest.approx(0.01, rel=1e-3)


def test_recomputed_activations_change_no_bit(ranks: list[dict[str, Any]]) -> None:
    for kept, recomputed in (("float32", "float32, full"), ("bfloat16", "bfloat16, selective")):
        for rank in ranks:
            assert rank[kept]["loss after"] == rank[recomputed]["loss after"]


def test_bfloat16_computes_in_bfloat16_and_keeps_float32(ranks: list[dict[str, Any]], plain: dict[str, Any]) -> None:
    seen = ranks[0]["bfloat16"]
    assert all(value.dtype == torch.float32 for value in [*seen["updated"].values(), *seen["gradients"].values()])
    assert math.isfinite(seen["loss"])
    assert seen["loss"] != ranks[0]["float32"]["loss"]
    assert seen["loss"] == pytest.approx(ranks[0]["float32"]["loss"], rel=0.02)
    assert seen["loss after"] < seen["loss"]


def test_names_in_the_checkpoint_are_those_of_the_plain_model(
    ranks: list[dict[str, Any]], plain: dict[str, Any]
) -> None:
    for way in ("float32", "float32, full", "bfloat16, selective"):
        assert ranks[0][way]["fqns"] == list(plain["initial"])
