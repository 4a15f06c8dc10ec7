"""A save finds NaN in weights and optimizer states, logs it, and a checkpoint without NaN is always kept."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.small_run import SmallRun
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.checkpoint.saving.writer import names_with_nan
from torchtitan_lite.store.manifest import Manifest

FLOATS_OF_8_BITS = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]


def found(prefix: str = "model.", **tensors: torch.Tensor) -> list[str]:
    return names_with_nan([name.replace("_", ".") for name in tensors], list(tensors.values()), prefix)


def with_nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


@given(st.lists(st.integers(0, 40), max_size=4), st.sampled_from([torch.float16, torch.bfloat16, torch.float64]))
def test_nan_is_found_whatever_the_shape_and_dtype(shape: list[int], dtype: torch.dtype) -> None:
    tensor = with_nan(*shape, dtype=dtype)
    assert found(model_w=tensor, model_b=torch.zeros(3)) == (["model.w"] if tensor.numel() else [])
    assert found(model_w=tensor.T if tensor.dim() == 2 else tensor) == (["model.w"] if tensor.numel() else [])


@pytest.mark.parametrize("dtype", FLOATS_OF_8_BITS)
def test_nan_is_found_in_floats_of_8_bits(dtype: str) -> None:
    kind = getattr(torch, dtype)
    tensor = torch.ones(1000, 9).to(kind)
    assert found(model_w=tensor, optimizer_m=tensor) == []
    tensor[-1, -1] = torch.tensor(math.nan).to(kind)
    assert found(model_w=tensor, optimizer_m=tensor) == ["model.w", "optimizer.m"]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
def test_nan_is_found_in_either_part_of_complex_numbers(dtype: torch.dtype) -> None:
    for value in (complex(math.nan, 0), complex(0, math.nan)):
        tensor = torch.zeros(1000, 9, dtype=dtype)
        assert found(model_w=tensor, model_c=tensor.conj(), optimizer_m=tensor) == []
        tensor[-1, -1] = value
        assert found(model_w=tensor, model_c=tensor.conj(), optimizer_m=tensor) == ["model.w", "model.c", "optimizer.m"]
    assert found(model_w=torch.tensor(complex(0, math.nan), dtype=dtype)) == ["model.w"]


def test_both_ends_of_a_large_tensor_are_checked() -> None:
    for index in ((0, 0), (999, 999)):
        tensor = torch.zeros(1000, 1000)
        tensor[index] = math.nan
        assert found(model_w=tensor) == ["model.w"]


def test_infinity_integers_and_other_states_are_not_reported() -> None:
    assert found(model_mask=torch.full((3, 3), -math.inf), model_n=torch.ones(3, dtype=torch.int64)) == []
    assert found(dataloader_w=with_nan(3)) == []
    assert found(prefix="", w=with_nan(3)) == ["w"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_optimizer_state_that_is_not_finite_is_found_and_a_single_number_is_not(value: float) -> None:
    moments, lowest = torch.zeros(1000, 1000), torch.tensor(value)
    assert found(model_w=torch.ones(2), optimizer_m=moments, optimizer_lowest=lowest) == []
    moments[-1, -1] = value
    assert found(model_w=torch.ones(2), optimizer_m=moments) == ["optimizer.m"]
    assert found(model_w=with_nan(2), optimizer_m=moments) == ["model.w", "optimizer.m"]


def test_moments_whose_squares_overflow_are_finite() -> None:
    assert found(optimizer_m=torch.full((3,), 1e30)) == []


def test_a_selection_of_very_many_tensors_is_checked() -> None:
    tensors = {f"model_{index}": with_nan(1) for index in range(10_000)}
    assert 900 < len(found(**tensors)) <= 1024


def test_of_very_many_states_that_are_not_finite_all_are_named() -> None:
    assert len(found(**{f"optimizer_{index}": with_nan(1) for index in range(3_000)})) == 3_000


def diverge(run: SmallRun) -> None:
    with torch.no_grad():
        run.model.first.weight.fill_(math.nan)


def nan_in(folder: Path) -> object:
    manifest = Manifest.of_folder(folder)
    assert manifest is not None
    return manifest.extra.get("nan_in")


def test_a_save_of_nan_succeeds_with_one_warning_and_the_last_finite_one_is_kept(
    start_run: StartRun, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run(interval=1, keep_latest_k=1, async_mode=mode)
    run.train(2, last=False)
    diverge(run)
    run.train(4, last=False)
    run.manager.close()
    assert run.committed() == [2, 4]
    assert nan_in(run.root / "step-2") is None
    warned = [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]
    assert len(warned) == 2
    assert warned[0].startswith("Step 3 is saved with NaN in its weights (model.first.")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_before_moments_that_are_not_finite_is_kept_and_rolled_back_to(
    start_run: StartRun, caplog: pytest.LogCaptureFixture, value: float
) -> None:
    run = start_run(interval=1, keep_latest_k=1)
    run.train(1, last=False)
    run.optimizer.state[run.model.first.weight]["exp_avg"][0, 0] = value
    assert run.manager.save(2)
    assert run.committed() == [1, 2]
    name = r"optimizer\.state\.first\.weight\.exp_avg"
    assert re.search(rf"Step 2 is saved with NaN or infinity in its optimizer states \({name}\)", caplog.text)
    assert run.manager.roll_back(3, "loss is nan") == 1


def test_a_resume_from_nan_warns_and_keeps_the_last_finite_checkpoint(
    start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run(interval=1, keep_latest_k=1)
    run.train(1, last=False)
    diverge(run)
    run.train(2, last=False)
    run.manager.close()
    caplog.clear()
    again = start_run(seed=1, interval=1, keep_latest_k=1)
    with caplog.at_level(logging.WARNING):
        again.manager.load()
    assert "was saved with NaN in its weights or optimizer; --checkpoint.load_step rolls back" in caplog.text
    again.train(3, last=False)
    assert again.committed() == [1, 3]
    back = start_run(seed=2, load_step=1).resumed()
    assert all(parameter.isfinite().all() for parameter in back.model.parameters())


class Lowest(torch.optim.SGD):
    """Keeps the lowest of each gradient's elements, from infinity on, and uses it for nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # without a loss
        super().step()
        for parameter in self.param_groups[0]["params"]:
            lowest = self.state[parameter].setdefault("lowest", torch.full_like(parameter, math.inf))
            lowest[:1] = torch.minimum(lowest[:1], parameter.detach()[:1])


def test_a_state_that_the_optimizer_begins_with_infinite_is_warned_of_once_and_counts_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(seed: int) -> tuple[nn.Linear, CheckpointManager]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        optimizer = Lowest(model.parameters(), lr=0.1, momentum=0.9)
        keys = {"folder": tmp_path, "interval": 1, "keep_latest_k": 1}
        manager = CheckpointManager.for_loop(model=model, optimizer=optimizer, **keys)
        manager.load()
        manager.reset()
        return model, manager

    def train(model: nn.Linear, manager: CheckpointManager, step: int) -> None:
        model(torch.ones(1, 3)).sum().backward()
        manager._run.optimizers[0].step()
        manager.save(step)

    model, manager = start(0)
    with manager:
        train(model, manager, 1)
        assert "Step 1, the first that this run saves, has NaN or infinity in optimizer states" in caplog.text
        caplog.clear()
        train(model, manager, 2)
    model, manager = start(1)
    with manager:
        train(model, manager, 3)
        assert not [each for each in caplog.records if "NaN" in each.getMessage()]
        assert [each.name for each in tmp_path.glob("step-*")] == ["step-3"]
        assert nan_in(tmp_path / "step-3") is None
        assert manager.roll_back(4, "loss is nan") == 3
        manager._run.optimizers[0].state[model.weight]["momentum_buffer"][0] = math.inf
        train(model, manager, 4)
        assert nan_in(tmp_path / "step-4") == ["optimizer.state.weight.momentum_buffer"]
        assert manager.roll_back(5, "loss is nan") == 3


def test_what_another_folder_says_of_it_counts_in_a_new_one(tmp_path: Path) -> None:
    def start(folder: Path, **keys: Any) -> tuple[nn.Linear, Lowest, CheckpointManager]:
        model = nn.Linear(3, 2)
        optimizer = Lowest(model.parameters(), lr=0.1, momentum=0.9)
        manager = CheckpointManager.for_loop(model=model, optimizer=optimizer, folder=folder, interval=1, **keys)
        manager.load()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer, manager

    model, optimizer, manager = start(tmp_path / "a")
    with manager:
        manager.save(1)
        optimizer.state[model.weight]["momentum_buffer"][0] = math.inf
        manager.save(2)
    damaged = ["optimizer.state.weight.momentum_buffer"]
    assert nan_in(tmp_path / "a" / "step-2") == damaged
    loads = {"initial_load_path": str(tmp_path / "a" / "step-2"), "initial_load_model_only": False}
    *_, manager = start(tmp_path / "b", **loads)
    with manager:
        manager.save(3)
    assert nan_in(tmp_path / "b" / "step-3") == damaged


def test_a_run_that_diverged_before_its_first_save_has_no_such_state(start_run: StartRun) -> None:
    run = start_run(interval=1)
    diverge(run)
    run.train(1, last=False)
    found = nan_in(run.root / "step-1")
    assert isinstance(found, list) and "optimizer.state.first.weight.exp_avg" in found
