"""What `for_loop` and `load_model` say of wrong arguments, in the words of their own parameters."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.only_once import load_and_close, save_and_close
from torchtitan_lite.checkpoint import CheckpointManager, load_model
from torchtitan_lite.errors import CheckpointMismatch, CheckpointNotFound, ConfigError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": 3}, "model: expected a module or a list of them, found an int."),
        ({"model": []}, "model: expected a module or a list of them, found none."),
        ({"model": [nn.Linear(1, 1), 3]}, "model[1]: expected a module, found an int."),
        ({"optimizer": nn.Linear(1, 1)}, "optimizer: expected an optimizer, found a Linear."),
        ({"optimizer": [3]}, "optimizer[0]: expected an optimizer, found an int."),
        ({"lr_scheduler": nn.Linear(1, 1)}, "lr_scheduler: expected a scheduler, found a Linear."),
        ({"dataloader": nn.Linear(1, 1)}, "dataloader: expected an object with a state, or None, found a Linear."),
        ({"states": [3]}, "states: expected a dict of names and states, found a list."),
    ],
    ids=str,
)
def test_a_wrong_argument_of_a_loop_is_called_as_in_the_loop(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        CheckpointManager.for_loop(**{"model": nn.Linear(1, 1), "folder": tmp_path, **given})


@pytest.mark.parametrize("name", ["path", "checkpoint_dir", "dirpath", "save_folder", "output_dir"])
def test_other_names_of_the_folder_are_known(name: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {name: str(tmp_path)}
    with pytest.raises(ConfigError, match=f"{name} is not a key .*folder='outputs/checkpoint'"):
        CheckpointManager.for_loop(model=nn.Linear(1, 1), **given)


def test_swapped_arguments_of_load_model_are_named_without_the_model(tmp_path: Path) -> None:
    model: Any = nn.Sequential(nn.Linear(1, 1))
    folder: Any = tmp_path
    with pytest.raises(ConfigError, match=r"folder: expected the path .* found an object of Sequential\. Give"):
        load_model(folder, model)
    with pytest.raises(ConfigError, match=r"^folder: expected the path .* found an object of Linear\. Give"):
        CheckpointManager.for_loop(model=model, folder=model[0])


def test_the_refusal_of_a_shallower_model_ends_with_what_loads_it(tmp_path: Path) -> None:
    def managed(depth: int, **keys: Any) -> CheckpointManager:
        model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(depth)])
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return CheckpointManager.for_loop(
            model=model, optimizer=optimizer, folder=tmp_path, preemption_signals=(), **keys
        )

    save_and_close(managed(2))
    with managed(1) as manager:
        with pytest.raises(CheckpointMismatch, match=r"1\.weight(.|\n)*--checkpoint\.load_strictness=warn$"):
            manager.load()
        with pytest.raises(CheckpointNotFound, match=r"step 99 is not in .*loop of your own, load\(\) takes it"):
            manager.load(99)
    load_and_close(managed(1, load_strictness="warn"))


def test_a_plain_dict_is_a_state_and_is_restored_in_place(tmp_path: Path) -> None:
    def managed(held: dict[Any, Any]) -> CheckpointManager:
        return CheckpointManager.for_loop(
            model=nn.Linear(1, 1), states={"progress": held}, folder=tmp_path, preemption_signals=()
        )

    held: dict[Any, Any] = {"best_val_loss": 1e9, "config": {"n_layer": 2, 7: (1, 2)}, "losses": [1.0], "none": None}
    held["seen"] = torch.arange(3)
    with managed(held) as manager:
        held["best_val_loss"] = 0.5
        manager.save(1, force=True)
        held["best_val_loss"], held["later"] = 0.25, True
        assert manager.load(1)
        assert held["best_val_loss"] == 0.5 and "later" not in held
    again: dict[Any, Any] = {"best_val_loss": 1e9}
    load_and_close(managed(again))
    assert torch.equal(again.pop("seen"), held.pop("seen"))
    assert again == held


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (1e9, r"'best' is a float, .*Put a value into a dict.*\{'best': \{'value': \.\.\.\}\}"),
        (torch.zeros(2), r"'best' is a Tensor, .*Put a value into a dict"),
        (object(), r"'best' is an object, which has no state_dict"),
        ({"ema": nn.Linear(1, 1)}, r"'best' is a dict with a Linear under 'ema', .*\{'best_ema': \.\.\.\}"),
    ],
    ids=["number", "tensor", "object", "dict"],
)
def test_what_is_no_state_is_refused_with_how_to_give_it(state: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointManager.for_loop(model=nn.Linear(1, 1), states={"best": state}, folder=tmp_path)
