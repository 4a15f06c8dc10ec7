"""What docs/several_models.md says of models, buffers and generators that are in one checkpoint, or are not."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections import deque, namedtuple
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from tests.checkpoint.only_once import load_and_close, save_and_close
from tests.forked import REPO
from tests.logged import logged_warnings
from tests.ranks import Ranks
from torchtitan_lite.checkpoint import CheckpointManager, load_model
from torchtitan_lite.errors import CheckpointMismatch, SaveFailed

NAMES = ("policy", "critic", "reference", "target")
Transition = namedtuple("Transition", "where reward")
Episode = enum.Enum("Episode", "ENDED")
Limits = dataclasses.make_dataclass("Limits", ["steps"])


def nets(seed: int) -> dict[str, nn.Module]:
    """Return the four models of the page; the last two are frozen."""
    torch.manual_seed(seed)
    found = {name: nn.Linear(4, 4) for name in NAMES}
    for name in NAMES[2:]:
        found[name].requires_grad_(False)
    return dict(found)


def optimizers_of(models: Mapping[str, nn.Module]) -> list[Optimizer]:
    return [torch.optim.AdamW(models[name].parameters(), lr=0.1) for name in NAMES[:2]]


def train(models: Mapping[str, nn.Module], optimizers: list[Optimizer]) -> None:
    """Step both optimizers, and average the critic into the target network."""
    for name, optimizer in zip(NAMES[:2], optimizers, strict=True):
        for parameter in models[name].parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    for name, delayed in models["target"].state_dict().items():
        delayed.lerp_(models["critic"].state_dict()[name], 0.5)


def together(models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the arguments of the first form on the page: one model."""
    return {"model": nn.ModuleDict(dict(models)), "optimizer": optimizers_of(models)}


def apart(models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return those of the second form: the policy is the model."""
    others = {name: model for name, model in models.items() if name != "policy"}
    return {"model": models["policy"], "optimizer": optimizers_of(models), "states": others}


def target_apart(models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return those of a run that leaves out what is not trained, but not the target network."""
    rest = {name: model for name, model in models.items() if name != "target"}
    return together(models) | {"model": nn.ModuleDict(rest), "states": {"target": models["target"]}}


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("form", [together, apart])
def test_both_forms_bring_all_models_and_optimizers_back(form: Any, tmp_path: Path) -> None:
    first, second = nets(1), nets(2)
    arguments, resumed = form(first), form(second)
    with CheckpointManager.for_loop(**arguments, folder=tmp_path) as manager:
        train(first, arguments["optimizer"])
        manager.save(1, force=True)
    load_and_close(CheckpointManager.for_loop(**resumed, folder=tmp_path))
    for models, optimizers in ((first, arguments["optimizer"]), (second, resumed["optimizer"])):
        train(models, optimizers)
    assert all(equal(first[name], second[name]) for name in NAMES)


def test_the_policy_alone_is_loaded_from_either_form(tmp_path: Path) -> None:
    models = nets(1)
    for form in (together, apart):
        save_and_close(CheckpointManager.for_loop(**form(models), folder=tmp_path / form.__name__))
    one, other = nets(2)["policy"], nets(3)["policy"]
    load_model(nn.ModuleDict({"policy": one}), tmp_path / "together", load_include=["policy.*"])
    load_model(other, tmp_path / "apart")
    assert equal(one, models["policy"]) and equal(other, models["policy"])


@pytest.mark.parametrize(("form", "comes_back"), [(together, False), (target_apart, True)])
def test_of_what_is_trained_only_a_target_network_comes_back_as_a_state(
    form: Any, comes_back: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = nets(1), nets(2)
    arguments = form(first)
    with CheckpointManager.for_loop(**arguments, folder=tmp_path, save_trained_only=True, interval=1) as manager:
        for step in (1, 2):
            train(first, arguments["optimizer"])
            manager.save(step, force=step == 2)
    named = "Training changes model.target." in caplog.text
    assert named is not comes_back and "model.reference" not in caplog.text
    load_and_close(CheckpointManager.for_loop(**form(second), folder=tmp_path, save_trained_only=True))
    assert equal(second["critic"], first["critic"])
    assert equal(second["reference"], nets(2)["reference"]), "the loop loads it from elsewhere"
    assert equal(second["target"], first["target"]) is comes_back


class Buffer:
    """A replay buffer that is in some checkpoints only."""

    def __init__(self) -> None:
        self.rows, self.is_due = torch.zeros(4), True

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows} if self.is_due else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = state_dict.get("rows", torch.full((4,), -1.0))


def manager_of(folder: Path, states: dict[str, Any], **checkpoint: Any) -> CheckpointManager:
    return CheckpointManager.for_loop(model=nn.Linear(2, 2), states=states, folder=folder, interval=1, **checkpoint)


def test_a_buffer_begins_empty_where_a_start_excludes_it_or_leaves_it_out(tmp_path: Path) -> None:
    held = {"rows": torch.ones(3), "written": 3}
    save_and_close(manager_of(tmp_path, {"replay": held}))
    empty = {"rows": torch.zeros(3), "written": 0}
    load_and_close(manager_of(tmp_path, {"replay": empty}, exclude_from_loading=["replay"]))
    assert empty["written"] == 0
    with manager_of(tmp_path, {}, load_only=True) as manager, logged_warnings() as warned:
        assert manager.load()
    assert warned == ["The checkpoint has states that this run does not load, and will not save: replay"]


def test_a_buffer_that_a_checkpoint_lacks_is_refused_unless_this_start_excludes_it(tmp_path: Path) -> None:
    save_and_close(manager_of(tmp_path, {}))
    added = {"rows": torch.zeros(3)}
    fix = r"(?s)missing.*replay.*--checkpoint\.exclude_from_loading=replay"
    with manager_of(tmp_path, {"replay": added}) as manager, pytest.raises(CheckpointMismatch, match=fix):
        manager.load()
    load_and_close(manager_of(tmp_path, {"replay": added}, exclude_from_loading=["replay"]))


def test_a_buffer_may_be_in_some_checkpoints_only(tmp_path: Path) -> None:
    buffer = Buffer()
    with manager_of(tmp_path, {"replay": buffer}) as manager:
        for step in (1, 2, 3):
            buffer.rows, buffer.is_due = torch.full((4,), float(step)), step != 2
            manager.save(step, force=True)
    for step, first in ((1, 1.0), (2, -1.0), (3, 3.0)):
        resumed = Buffer()
        with manager_of(tmp_path, {"replay": resumed}, load_only=True) as manager:
            manager.load(step)
        assert resumed.rows[0] == first


def test_the_generators_of_the_page_continue(tmp_path: Path) -> None:
    page = (REPO / "docs" / "several_models.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)
    first, second = (
        {"actions": torch.Generator().manual_seed(seed), "resets": np.random.default_rng(seed)} for seed in (1, 2)
    )
    for generators in (first, second):
        torch.rand(3, generator=generators["actions"])
        generators["resets"].random(3)
        with manager_of(tmp_path, {"generators": names["Generators"](**generators)}) as manager:
            if not manager.load():
                manager.save(1, force=True)
    assert torch.equal(*(torch.rand(5, generator=each["actions"]) for each in (first, second)))
    assert first["resets"].random() == second["resets"].random()


ROWS = [(torch.ones(2), 1.0), (torch.zeros(2), 2.0)]


@pytest.mark.parametrize(
    ("refused", "returned"),
    [
        (deque(ROWS), list(deque(ROWS))),
        (Transition(*ROWS[0]), tuple(Transition(*ROWS[0]))),
        ([Episode.ENDED], [Episode.ENDED.value]),
        (Limits(3), dataclasses.asdict(Limits(3))),
        (np.array([None, 1]), np.array([None, 1]).tolist()),
    ],
    ids=["deque", "namedtuple", "enum", "dataclass", "array"],
)
def test_what_the_page_says_is_refused_is_and_what_it_says_to_return_is_saved(
    refused: Any, returned: Any, tmp_path: Path
) -> None:
    with manager_of(tmp_path, {"held": {"it": refused}}) as manager, pytest.raises(SaveFailed, match=r"held\.it"):
        manager.save(1, force=True)
    with manager_of(tmp_path, {"held": {"it": returned}}) as manager:
        assert manager.save(1, force=True)


def save_rows(rank: int, folder: Path) -> None:
    rows = torch.arange(3.0) + 10 * rank
    held = {"rows": DTensor.from_local(rows, init_device_mesh("cpu", (2,)), [Shard(0)])}
    save_and_close(manager_of(folder, {"replay": held}))


def test_sharded_rows_are_loaded_on_another_number_of_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(save_rows, folder=tmp_path)
    held = {"rows": torch.zeros(6)}
    load_and_close(manager_of(tmp_path, {"replay": held}))
    assert held["rows"].tolist() == [0.0, 1.0, 2.0, 10.0, 11.0, 12.0]
