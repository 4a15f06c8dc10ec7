"""Every optimizer of torch resumes from a checkpoint as if it had never stopped."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.checkpoint.only_once import load_and_close, save_and_close
from tests.checkpoint.savers import Lent
from tests.checkpoint.small_run import job_config, same
from tests.checkpoint.state.optimizers_of_torch import Recipe, optimizers_of_torch, recipes, state_of, train_step
from tests.examples import mostly_slow
from tests.ranks import on_two_ranks
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.saving.savers import ProcessSaver
from torchtitan_lite.checkpoint.seams import Seams

RECIPES = recipes()
FEW = [recipe for recipe in RECIPES if recipe.kind.__name__ in ("SGD", "AdamW", "NAdam", "SparseAdam", "LBFGS")]
"""Optimizers that make different state at different times: enough for tests that do not depend on the optimizer."""


def start(folder: Path, recipe: Recipe, **options: Any) -> tuple[Any, Any, CheckpointManager]:
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = recipe.build(model)
    seams = {"saver": options.pop("saver")} if "saver" in options else {}
    manager = CheckpointManager(None, [model], [optimizer], [], {}, job_config(folder, **options), seams=Seams(**seams))
    return model, optimizer, manager


def test_every_optimizer_of_torch_has_a_recipe() -> None:
    made = {recipe.kind for recipe in recipes()}
    assert not [each.__name__ for each in optimizers_of_torch() if each not in made]


@pytest.mark.parametrize("recipe", mostly_slow(RECIPES, kept=FEW), ids=str)
def test_three_steps_a_resume_and_two_more_are_five_steps(tmp_path: Path, recipe: Recipe) -> None:
    """The later steps use a layer that had no gradient before: its state begins then, as in a run that never saved."""
    saved, its_optimizer, manager = start(tmp_path, recipe)
    model, optimizer, _ = start(tmp_path, recipe)
    with manager:
        for step in range(1, 4):
            train_step(saved, its_optimizer, step)
            train_step(model, optimizer, step)
            manager.save(step, force=step == 3)
    at_save = state_of(optimizer)
    losses = [train_step(model, optimizer, step, late=True) for step in (4, 5)]
    again, other, loading = start(tmp_path, recipe)
    load_and_close(loading)
    assert same(state_of(other), at_save)
    assert [[*each] for each in state_of(other)] == [[*each] for each in at_save], "the keys in their order"
    assert [train_step(again, other, step, late=True) for step in (4, 5)] == losses
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    assert same(state_of(other), state_of(optimizer))
    assert same(_settings(other), _settings(optimizer))


@on_two_ranks
def test_the_keys_of_a_sharded_state_keep_their_order(rank: int, tmp_path: Path) -> None:
    def sharded() -> tuple[nn.Module, torch.optim.Optimizer, CheckpointManager]:
        model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
        return model, optimizer, CheckpointManager(None, model, optimizer, None, None, job_config(tmp_path))

    model, optimizer, manager = sharded()
    with manager:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        manager.save(1, force=True)
    _, again, manager = sharded()
    load_and_close(manager)
    keys = [[*each] for each in optimizer.state_dict()["state"].values()]
    assert [[*each] for each in again.state_dict()["state"].values()] == keys


@pytest.mark.parametrize("recipe", mostly_slow(RECIPES, kept=FEW), ids=str)
def test_saved_before_its_first_step_it_comes_back_without_state(tmp_path: Path, recipe: Recipe) -> None:
    _, optimizer, manager = start(tmp_path, recipe)
    save_and_close(manager)
    again, other, loading = start(tmp_path, recipe)
    fresh = state_of(other)
    load_and_close(loading)
    assert same(state_of(other), fresh)
    assert same(state_of(optimizer), fresh)
    train_step(again, other, 1)


@pytest.mark.parametrize("recipe", FEW, ids=str)
def test_a_load_drops_the_state_from_before(tmp_path: Path, recipe: Recipe) -> None:
    _, _, manager = start(tmp_path, recipe)
    save_and_close(manager)
    again, other, loading = start(tmp_path, recipe)
    fresh = state_of(other)
    train_step(again, other, 1, late=True)
    load_and_close(loading)
    assert same(state_of(other), fresh)


@pytest.mark.parametrize("recipe", FEW[::2], ids=str)
def test_saves_do_not_change_the_run(tmp_path: Path, recipe: Recipe, mode: str, process_saver: ProcessSaver) -> None:
    """Settings, gradients, counts of hooks and random generators are as in a run that never saves."""

    def run(folder: Path, *, saves: bool) -> tuple[Any, ...]:
        lent = {"saver": Lent(process_saver)} if mode == "async_with_pinned_mem" else {}
        model, optimizer, manager = start(folder, recipe, interval=1, async_mode=mode, **lent)
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        with manager:
            for step in range(1, 4):
                train_step(model, optimizer, step, late=step == 3)
                if saves:
                    manager.save(step)
                gradients = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
        drawn = (random.random(), float(torch.rand(1)))
        dense = [each.to_dense() if each is not None and each.is_sparse else each for each in gradients]
        return dict(model.state_dict()), state_of(optimizer), _settings(optimizer), calls, dense, drawn

    random.seed(0)
    never = run(tmp_path / "never", saves=False)
    random.seed(0)
    assert all(map(same, run(tmp_path / "saved", saves=True), never))


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
