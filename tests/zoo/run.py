"""One run of a case: its objects, its steps, its manager."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tests.checkpoint.small_run import job_config
from tests.checkpoint.state.optimizers_of_torch import recipes
from tests.zoo.extras import EXTRAS, SCALER, TWO_GROUPS, TWO_OPTIMIZERS, is_sparse, states_of
from tests.zoo.models import BATCH, FSDP2, INPUT, MODELS, PLAIN, TP, TRAINED_ONLY, WRAPPERS, Stage, Subject, set_step
from tests.zoo.schedules import RECIPES
from tests.zoo.snapshot import in_pieces, model_state, optimizer_state
from torchtitan_lite.checkpoint.manager import CheckpointManager

OPTIMIZERS = {str(recipe): recipe for recipe in recipes()}
MODES = ("disabled", "async", "async_with_pinned_mem")
SPARSE = "sparse Embedding"
_FSDP2 = {FSDP2, "HSDP", TP, "TP x FSDP2, uneven"}
_SHARDED = {*_FSDP2, "FSDP1 with a mesh"}
NOT_TOGETHER = {
    SPARSE: _SHARDED,
    "an empty parameter": _FSDP2,
    "a scalar parameter": _SHARDED,
    "several dtypes": _SHARDED,
    "channels last": _FSDP2,
    TRAINED_ONLY: {"FSDP1 with a mesh"},  # The manager refuses it.
    "swa_utils.AveragedModel": _SHARDED,
    "Rprop": _FSDP2,
    "Adafactor": _FSDP2,
    "LBFGS": {
        SCALER,
        TWO_GROUPS,
        TP,
        "TP x FSDP2, uneven",
        "PP",
    },  # Each stage decides by itself how often it evaluates.
    SCALER: {"PP"},  # A stage without the loss has nothing to scale, and no scale.
}
"""Entries that torch cannot train together: no case combines them, so that its other entries are tested."""


@dataclass(frozen=True)
class Case:
    """A combination of entries; each field is a name in the dict of its kind."""

    model: str = "plain layers"
    optimizer: str = "AdamW"
    scheduler: str = "LambdaLR"
    wrapper: str = PLAIN
    extra: str = "none"
    mode: str = "disabled"
    width: int = 0
    """Width of the model; 0: that of the wrapper."""

    def __str__(self) -> str:
        return ", ".join([self.model, self.optimizer, self.scheduler, self.wrapper, self.extra, self.mode])

    @property
    def world_size(self) -> int:
        return WRAPPERS[self.wrapper].world_size

    @property
    def is_offered(self) -> bool:
        """Whether torch can train it; see `NOT_TOGETHER`."""
        chosen = {self.model, self.optimizer.partition("-")[0], self.scheduler, self.wrapper, self.extra}
        if self.optimizer.startswith("SparseAdam") and self.model != SPARSE:
            return False
        if self.optimizer.startswith("Muon") and self.wrapper == "PP" and self.extra == TWO_OPTIMIZERS:
            return False  # The first stage has one matrix, which the other optimizer gets.
        return not any(first in chosen and chosen & others for first, others in NOT_TOGETHER.items())

    def under(self, wrapper: str) -> Case:
        """Return the same model under another wrapper."""
        return replace(self, wrapper=wrapper, width=self.width or WRAPPERS[self.wrapper].width)


class Run:
    """The objects of a case on one rank. The constructor and the steps are **collective**."""

    def __init__(self, case: Case, rank: int, seed: int) -> None:
        self.case, self.rank = case, rank
        wrapper = WRAPPERS[case.wrapper]
        torch.manual_seed(seed)
        self.after_step: list[Callable[[], Any]] = []
        self.scaler: Any = None
        self.step = 0
        with quiet():
            self.wrapped = wrapper.wrap(Subject(MODELS[case.model], case.width or wrapper.width))
            self.module: nn.Module = self.wrapped.module
            self.is_pipeline = isinstance(self.wrapped, Stage)
            self.optimizers = _optimizers(case, self.module)
            self.schedulers = [made for each in self.optimizers if (made := RECIPES[case.scheduler](each)) is not None]
            if case.extra == TWO_OPTIMIZERS and self.schedulers:
                self.schedulers[0] = torch.optim.lr_scheduler.ExponentialLR(self.optimizers[0], 0.6)
            self.states = EXTRAS[case.extra](self)
        # Each rank has its own dropout, except the ranks of a tensor-parallel group, which must compute the same.
        torch.manual_seed(seed + 1000 + (rank // 2 if case.wrapper.startswith(TP) else rank))

    def manager(self, folder: Path, **options: Any) -> CheckpointManager:
        """Return the manager of this run."""
        options = {"digest_tensors": ("save",), "save_trained_only": self.case.model == TRAINED_ONLY, **options}
        config = job_config(folder, interval=3, async_mode=self.case.mode, max_failed_saves=1, **options)
        return CheckpointManager(None, self.module, self.optimizers, self.schedulers, self.states, config)

    def train(self, until: int, manager: CheckpointManager | None = None) -> list[float]:
        """Train to the end of step `until`, calling `manager` after each step. Return the losses."""
        losses = []
        while self.step < until:
            self.step += 1
            with quiet():
                losses.append(self._train_step(manager))
            if manager is not None:
                # In an asynchronous mode a forced save would be synchronous.
                manager.save(self.step, force=self.step == 3 and self.case.mode == "disabled")
        return losses

    def _train_step(self, manager: CheckpointManager | None) -> float:
        batch = torch.randn(BATCH, INPUT, generator=torch.Generator().manual_seed(self.step))
        set_step(self.module, self.step)

        def evaluate() -> float:
            for each in self.optimizers:
                each.zero_grad()
            scale = (lambda loss: loss) if self.scaler is None else self.scaler.scale
            return self.wrapped.forward_backward(batch, scale)

        loss = evaluate()
        if manager is not None:
            manager.maybe_wait_for_staging()
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(lambda: torch.tensor(evaluate()))
            elif self.scaler is not None:
                self.scaler.step(optimizer)
            else:
                optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        for scheduler in self.schedulers:
            scheduler.step(*[1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else [])
        for call in self.after_step:
            call()
        return loss

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of all state of this rank that a resume must restore."""
        whole = {
            "model": model_state(self.module),
            "all buffers": dict(self.module.named_buffers()),
            "optimizer": optimizer_state(self.module, self.optimizers),
            "schedulers": [each.state_dict() for each in self.schedulers],
            "extra": states_of(self.states),
            "random": torch.get_rng_state(),
        }
        copied: dict[str, Any] = in_pieces(whole)
        return copied


def _optimizers(case: Case, module: nn.Module) -> list[Optimizer]:
    """Return the optimizer of the case, and others for the parameters that it does not support."""
    recipe = OPTIMIZERS[case.optimizer]
    arguments = dict(recipe.arguments)
    if "TP" in case.wrapper and "foreach" in inspect.signature(recipe.kind).parameters:
        arguments["foreach"] = False  # torch's foreach kernels need all tensors on one mesh.
    rows = [each.weight for each in module.modules() if is_sparse(each)]
    others = [each for each in module.parameters() if not any(each is row for row in rows)]
    made: list[Optimizer] = []
    if rows:
        made.append(torch.optim.SparseAdam(rows, lr=0.01))
    if case.optimizer.startswith("Muon"):
        vectors = [each for each in others if each.ndim != 2]
        others = [each for each in others if each.ndim == 2]
        made.append(torch.optim.AdamW(vectors, lr=0.01))
    kind = torch.optim.AdamW if case.optimizer.startswith("SparseAdam") else recipe.kind
    if case.extra == TWO_OPTIMIZERS:
        made.append(torch.optim.SGD(others[:1], lr=0.05, momentum=0.9))
        others = others[1:]
    if case.extra == TWO_GROUPS:
        groups = [{"params": others[:1], "lr": 0.02}, {"params": others[1:]}]
        return [*made, kind(groups, **arguments)]
    return [*made, kind(others, **arguments)]


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore torch's warnings: the zoo also has deprecated features, because users have them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
