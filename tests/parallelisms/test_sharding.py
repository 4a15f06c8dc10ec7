"""Two ranks with FSDP hold and compute the same as one plain process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parallelisms import sharded_group as group
from tests.ranks import Ranks


@pytest.fixture(scope="module")
def ranks(two_ranks: Ranks) -> list[dict[str, Any]]:
    """The results of each of two ranks."""
    return two_ranks.run(group.train_in_several_ways)


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The results of one process that trains on the batches of both."""
    return group.trained(group.build(None, group.job()), group.batch())


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


@pytest.mark.parametrize(("rows", "columns", "dim"), group.SPLITS)
def test_any_split_is_bitwise_that_of_one_process(
    ranks: list[dict[str, Any]], rows: int, columns: int, dim: int
) -> None:
    whole = nn.Linear(columns, rows, bias=False)
    group.init_parameters(whole, group.SEED, lambda fqn: group.Normal(std=1.0))
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
