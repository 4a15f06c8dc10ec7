"""`save_trained_only` in loops that change `requires_grad`: what was trained is saved, and loaded, frozen or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoint.only_once import load_and_close
from torchtitan_lite.checkpoint import CheckpointManager, load_model
from torchtitan_lite.errors import CheckpointMismatch


class Phases:
    """SGD over a base, which is trained in the steps `unfrozen` only, and a head. A checkpoint every five steps."""

    def __init__(self, folder: Path, unfrozen: Sequence[int], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.ModuleDict({"base": nn.Linear(4, 4), "head": nn.Linear(4, 1)})
        self.model["base"].requires_grad_(False)
        self.unfrozen = unfrozen
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.manager = CheckpointManager.for_loop(
            model=self.model,
            optimizer=self.optimizer,
            folder=folder,
            interval=5,
            save_trained_only=True,
            preemption_signals=(),
        )

    def train(self, first: int, last: int, *, freezes_before_save: bool = False) -> dict[str, torch.Tensor]:
        """Train the steps from `first` to `last` and return the model's state."""
        for step in range(first, last + 1):
            self.model["base"].requires_grad_(step in self.unfrozen)
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            self.model["head"](torch.tanh(self.model["base"](x))).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if freezes_before_save:
                self.model["base"].requires_grad_(False)
            self.manager.save(step)
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def differing(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


@pytest.mark.parametrize("freezes_before_save", [False, True])
def test_what_is_trained_between_two_saves_and_frozen_again_is_saved(tmp_path: Path, freezes_before_save: bool) -> None:
    run = Phases(tmp_path, unfrozen=(3, 4))
    with run.manager:
        run.train(1, 5, freezes_before_save=freezes_before_save)
        expected = run.train(6, 7, freezes_before_save=freezes_before_save)
    again = Phases(tmp_path, unfrozen=(3, 4))
    with again.manager:
        assert again.manager.load()
        found = again.train(6, 7)
    assert not differing(found, expected)


def test_a_loop_may_set_requires_grad_from_the_step_that_was_restored(tmp_path: Path) -> None:
    run = Phases(tmp_path, unfrozen=range(4, 9))
    with run.manager:
        run.train(1, 5)
        expected = run.train(6, 10)
    again = Phases(tmp_path, unfrozen=range(4, 9), seed=1)
    with again.manager:
        assert again.manager.load(5)
        assert not differing(again.train(6, 10), expected)
        assert again.manager.load(10)
    other = Phases(tmp_path, unfrozen=(), seed=2)
    assert load_model(other.model, tmp_path, save_trained_only=True) == 10
    assert not differing(other.model.state_dict(), expected)


def test_what_was_loaded_frozen_is_in_the_next_checkpoint(tmp_path: Path) -> None:
    run = Phases(tmp_path, unfrozen=(1, 2, 3, 4, 5))
    with run.manager:
        run.train(1, 5)
    second = Phases(tmp_path, unfrozen=(), seed=1)
    with second.manager:
        assert second.manager.load()
        expected = second.train(6, 10)
    third = Phases(tmp_path, unfrozen=(), seed=2)
    load_and_close(third.manager)
    assert not differing(third.model.state_dict(), expected)


def test_a_base_that_was_frozen_at_the_save_and_is_not_now_is_refused_with_the_way_out(tmp_path: Path) -> None:
    run = Phases(tmp_path, unfrozen=(6, 7))
    with run.manager:
        run.train(1, 5)
    again = Phases(tmp_path, unfrozen=(6, 7))
    again.model.requires_grad_(True)
    with again.manager:
        with pytest.raises(CheckpointMismatch, match=r"(?s)base\.weight.*freeze these before load\(\), and set"):
            again.manager.load()
        again.model["base"].requires_grad_(False)
        assert again.manager.load()
