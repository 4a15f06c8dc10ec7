"""A run's objects by the names that they have in a checkpoint, and the state of all of them.

People pass them in several forms (one module or a list, no optimizer or several). Only this module sees the forms:
all others see one model, one optimizer and named small states. It decides neither when to save nor where.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.state import arguments, fsdp1
from torchtitan_lite.checkpoint.state.gradients import GradientWatch
from torchtitan_lite.checkpoint.state.in_place import no_mixing
from torchtitan_lite.checkpoint.state.late_seed import LateSeedWatch
from torchtitan_lite.checkpoint.state.optimizer_owner import parameters_of
from torchtitan_lite.checkpoint.state.other_keys import other_names, try_load
from torchtitan_lite.checkpoint.state.per_rank import PerRank
from torchtitan_lite.checkpoint.state.rng import RNG, RngState
from torchtitan_lite.checkpoint.state.stateful import (
    LRSchedulerWrapper,
    ModelWrapper,
    OptimizerWrapper,
    Stateful,
    as_stateful,
)
from torchtitan_lite.checkpoint.state.unsaved import ForgottenWatch, UnsavedWatch
from torchtitan_lite.errors import ConfigError


class RunState:
    """`model`, `optimizer` and `small`, the other states by name. Raises ConfigError for an unsupported argument."""

    def __init__(
        self,
        dataloader: Stateful | None,
        model_parts: nn.Module | Sequence[nn.Module],
        optimizers: Optimizer | Sequence[Optimizer] | None,
        lr_schedulers: LRScheduler | Sequence[LRScheduler] | None,
        states: Mapping[str, Stateful | dict[Any, Any]] | None,
        trained_only: bool = False,
    ) -> None:
        further = {name: as_stateful(state) for name, state in (states or {}).items()}
        modules = {name: state for name, state in further.items() if isinstance(state, nn.Module)}
        parts = arguments.model_parts(model_parts)
        if trained_only:
            fsdp1.refuse_trained_only(parts)
        self.model = ModelWrapper(parts, trained_only=trained_only)
        self.optimizers = arguments.optimizers(optimizers)
        self.optimizer = OptimizerWrapper(self.model.parts, self.optimizers, modules)
        self.small = _small_states(dataloader, arguments.lr_schedulers(lr_schedulers), further, self.optimizer)
        self._modules = modules
        watched = {"model": parts} | {name: [module] for name, module in modules.items()}
        self._further = frozenset(further)
        self._empty: list[str] = []
        """The further states whose last state dict was empty."""
        self.gradients = GradientWatch(self.model.parts)
        self._unsaved = UnsavedWatch(watched, self.optimizers, self.model.left_out_tensors)
        self._forgotten = ForgottenWatch(further, watched)
        self.late_seed = LateSeedWatch()

    def at_step(self, step: int) -> None:
        """Note what `step` trained, and which metrics count, whether or not it is saved. Any rank."""
        self.late_seed.at_step(step)
        self.model.note_trainable()
        self._forgotten.look_at_counts()

    def after_save(self, step: int) -> None:
        """Look at what the save of `step`, which was just made or refused, could not have. On one rank."""
        self.gradients.after_save(step)
        self._forgotten.look(self._empty)

    def before_step(self, optimizer: Any) -> None:
        """Note what the step of `optimizer` trains, and which gradients it uses. Any rank."""
        self.gradients.before_step(optimizer)
        if self.model.is_trained_only:
            self.model.note_trained([each for each in parameters_of(optimizer) if each.grad is not None])

    def full(self, rank: int) -> State:
        """Return the full state of this `rank`. Raises what a state raises. **Collective** with FSDP1."""
        self._note_trained()
        small = {name: state.state_dict() for name, state in self.small.items()}
        self._empty = [name for name, state in small.items() if not state and name in self._further]
        # Each rank has its own key: no two ranks share their generators.
        rng = {f"rank{rank}": RngState().state_dict()}
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), **small, RNG: rng}
        if rank == 0:
            self._unsaved.look(state)
        return state

    @property
    def states_of_ranks(self) -> Collection[str]:
        """The names of the states in which each rank has an entry of its own, with the rank's number."""
        return {RNG, *(name for name, state in self.small.items() if isinstance(state, PerRank))}

    def is_finite(self) -> bool:
        """Return whether what is trained on this rank is finite, and the state of its optimizers. Any rank.

        What is frozen may be a mask, which is made of infinity.
        """
        states = (each for optimizer in self.optimizers for each in optimizer.state.values() if isinstance(each, dict))
        tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        tensors += [each for part in self.model.parts for each in part.parameters() if each.requires_grad]
        return all(_is_finite(tensor) for tensor in tensors if tensor.dim())

    def has_other_keys(self) -> bool:
        """Return whether a module may not take back what its `state_dict` returns. **Collective** with FSDP1."""
        self._note_trained()  # A load gives all that the save will have.
        own = any(other_names(module, module.state_dict()) for module in self._modules.values())
        return self.model.has_other_keys() or own

    def try_loads(self) -> None:
        """Have the modules load their own state. Raises as `try_load`. **Collective** with FSDP1."""
        self.model.try_load()
        for name, module in self._modules.items():
            entries = module.state_dict()
            if others := other_names(module, entries):
                with no_mixing(module):
                    try_load(name, [module], others, partial(module.load_state_dict, entries))

    def _note_trained(self) -> None:
        self.model.note_trainable()
        self.model.note_trained(self.optimizer.with_state() if self.model.is_trained_only else ())

    def seed(self) -> State:
        """Return the state of a seed checkpoint: only the model. **Collective** with FSDP1."""
        return {"model": self.model.state_dict()}


@torch.no_grad()
def _is_finite(tensor: torch.Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # Classes of other libraries, and floats of eight bits, do not say what of them is finite.
    can_say = type(local) in (torch.Tensor, nn.Parameter) and local.dtype.itemsize > 1 and not local.is_meta
    return not can_say or bool(local.isfinite().all())


def _small_states(
    dataloader: Stateful | None,
    lr_schedulers: Sequence[LRScheduler],
    states: Mapping[str, Stateful],
    optimizer: OptimizerWrapper,
) -> dict[str, Stateful]:
    own = {"model", "optimizer", "lr_scheduler", "dataloader", RNG}
    reserved = sorted(name for name in states if name.partition(".")[0] in own)
    if reserved:
        raise ConfigError(
            f"states: the name {reserved[0]!r} is the manager's own, or begins with one. Give your state another name."
        )
    small: dict[str, Stateful] = {}
    if dataloader is not None:
        small["dataloader"] = dataloader
    if lr_schedulers:
        small["lr_scheduler"] = LRSchedulerWrapper(lr_schedulers, optimizer)
    return small | dict(states)
