"""A run's objects by the names that they have in a checkpoint, and the state of all of them.

People pass them in several forms (one module or a list, no optimizer or several). Only this module sees the forms:
all others see one model, one optimizer and named small states. It decides neither when to save nor where.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchtitan_lite.checkpoint.format.flattening import State, flat_tensors, wide_float
from torchtitan_lite.checkpoint.state import arguments, fsdp1
from torchtitan_lite.checkpoint.state.names import no_mixing
from torchtitan_lite.checkpoint.state.optimizer_owner import parameters_of
from torchtitan_lite.checkpoint.state.optimizer_state import StateOwner
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
from torchtitan_lite.checkpoint.state.subclasses import inner_tensors, is_made_of_others
from torchtitan_lite.checkpoint.state.unsaved import MetricsWatch, UnsavedWatch
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import logger
from torchtitan_lite.torch_private import holds_unsharded_gradients, loader_iterators, num_yielded, seeds_of


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
        state_owner: StateOwner | None = None,
    ) -> None:
        further = {name: as_stateful(state) for name, state in (states or {}).items()}
        modules = {name: state for name, state in further.items() if isinstance(state, nn.Module)}
        parts = arguments.model_parts(model_parts)
        if trained_only:
            fsdp1.refuse_trained_only(parts)
        self.model = ModelWrapper(parts, trained_only=trained_only)
        self.optimizers = arguments.optimizers(optimizers)
        self.optimizer = OptimizerWrapper(self.model.parts, self.optimizers, modules, state_owner)
        self.small = _named_states(dataloader, arguments.lr_schedulers(lr_schedulers), further, self.optimizer)
        self._modules = modules
        watched = {"model": parts} | {name: [module] for name, module in modules.items()}
        self.gradients = GradientWatch(self.model.parts)
        self._unsaved = UnsavedWatch(watched, further, self.optimizers, self.model.left_out_tensors)
        self._metrics = MetricsWatch(watched, further)
        self.late_seed = LateSeedWatch()

    def at_step(self, step: int) -> None:
        """Note what `step` trained, and which metrics count, whether or not it is saved. Any rank."""
        with suppress(Exception):  # It only warns, on one rank.
            self.late_seed.at_step(step)
        self.model.note_trainable()
        self._metrics.look_at_counts()

    def after_save(self, step: int) -> None:
        """Look at what the save of `step`, which was just made or refused, could not have. On one rank."""
        self.gradients.after_save(step)
        self._metrics.look()

    def before_step(self, optimizer: Any) -> None:
        """Note what the step of `optimizer` trains, and which gradients it uses. Any rank."""
        self.gradients.before_step(optimizer)
        if self.model.is_trained_only:
            self.model.note_trained([each for each in parameters_of(optimizer) if each.grad is not None])

    def full(self, rank: int) -> State:
        """Return the full state of this `rank`. Raises what a state raises. **Collective** with FSDP1."""
        self._note_trained()
        small = {name: state.state_dict() for name, state in self.small.items()}
        # Each rank has its own key: no two ranks share their generators.
        rng = {f"rank{rank}": RngState().state_dict()}
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), **small, RNG: rng}
        self._unsaved.look(state, rank)
        return state

    @property
    def states_of_ranks(self) -> Collection[str]:
        """The names of the states in which each rank has an entry of its own, with the rank's number."""
        return {RNG, *(name for name, state in self.small.items() if isinstance(state, PerRank))}

    def is_finite(self, but_not: Collection[str] = ()) -> bool:
        """Return whether what is trained on this rank is finite, and the state of its optimizers. Any rank.

        Without the states `but_not`, by their keys in a checkpoint. What is frozen may be a mask, which is made of
        infinity. **Collective** with FSDP1.
        """
        flat = flat_tensors({"optimizer": self.optimizer.state_dict()})
        tensors = [value for key, value in flat.items() if key not in but_not]
        tensors += [each for part in self.model.parts for each in part.parameters() if each.requires_grad]
        return all(_is_finite(tensor) for tensor in tensors if tensor.dim())

    def has_other_keys(self) -> bool:
        """Return whether a module may not take back what its `state_dict` returns. **Collective** with FSDP1."""
        self._note_trained()  # A load gives all that the save will have.
        own = any(other_names(module, module.state_dict()) for module in self._modules.values())
        return self.model.has_other_keys() or own or self.optimizer.has_states_of_others()

    def try_loads(self) -> None:
        """Have the modules load their own state. Raises as `try_load`. **Collective** with FSDP1.

        Raises ConfigError, too, for states of an optimizer that a new one could not make.
        """
        self.optimizer.refuse_without_first_step()
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
    if is_made_of_others(local):
        return all(_is_finite(each) for each in inner_tensors("", local).values())
    # Classes of other libraries do not say what of them is finite, and floats of 4 bits always are.
    can_say = type(local) in (torch.Tensor, nn.Parameter) and not local.is_meta and "float4" not in f"{local.dtype}"
    return not can_say or bool(wide_float(local).isfinite().all())


def _named_states(
    dataloader: Stateful | None,
    lr_schedulers: Sequence[LRScheduler],
    states: Mapping[str, Stateful],
    optimizer: OptimizerWrapper,
) -> dict[str, Stateful]:
    own = {"model", "optimizer", "lr_scheduler", "dataloader", RNG}
    reserved = sorted(name for name in states if name.partition(".")[0] in own)
    if reserved:
        raise ConfigError(
            f"states: the name {reserved[0]!r} is the manager's own, or begins with such a name. Give your state "
            "another name."
        )
    small: dict[str, Stateful] = {}
    if dataloader is not None:
        small["dataloader"] = dataloader
    if lr_schedulers:
        small["lr_scheduler"] = LRSchedulerWrapper(lr_schedulers, optimizer)
    return small | dict(states)


# Warn of a save that came between two optimizer steps: the gradients that it found are in no checkpoint.
#
# They count only if they were made after the last step, and if the next step takes them in. Each step marks the
# gradients that it leaves behind, and a save marks those it finds; one that is set to None takes its mark with it. So
# no value is read, nothing is kept, and no device is waited for. A few gradients stand for all of an optimizer.
#
# Not seen are gradients that are zeroed in place, and those that DDP (`gradient_as_bucket_view`) or FSDP1 replace.


_MARK = "_torchtitan_lite_found_by"
_BY_A_STEP = "step"
_BY_A_SAVE = "save"
_SAMPLED = 8
"""Of the groups of an optimizer, and of the parameters of each group."""


class GradientWatch:
    """Watches the gradients that saves find, of optimizers that have stepped, and of modules of `fully_shard`."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = parts
        self._stepped: dict[int, Any] = {}
        self._saved: int | None = None
        """The step whose save found gradients that were made after the last step."""
        self._found_unsharded = False
        self._is_done = False

    def after_save(self, step: int) -> None:
        """Note the gradients that are there now, as `step` was saved. Any rank."""
        if self._is_done:
            return
        found = [list(_gradients(each)) for each in self._stepped.values()]
        new = list(chain(*(each for each in found if not any(_mark_of(gradient) == _BY_A_STEP for gradient in each))))
        _mark(new, _BY_A_SAVE)
        self._found_unsharded = bool(self._stepped) and self._has_unsharded()
        self._saved = step if new or self._found_unsharded else None

    def before_step(self, optimizer: Any) -> None:
        """Warn, once, if the step of `optimizer` uses gradients that the last save found. Any rank."""
        if self._saved is None:
            return
        is_lost = any(_mark_of(gradient) == _BY_A_SAVE for gradient in _gradients(optimizer))
        if is_lost or (self._found_unsharded and not self._has_unsharded()):
            self._is_done = True
            logger.warning(
                "Step %d was saved between two optimizer steps, and this one uses gradients from before that save, "
                "which no checkpoint has: a run that resumes from step %d takes its first optimizer step without them. "
                "Count optimizer steps, not batches, or call save() only after optimizer.step() and zero_grad()",
                self._saved,
                self._saved,
            )
            self._saved = None

    def after_step(self, optimizer: Any) -> None:
        """Mark the gradients that the step of `optimizer` leaves behind. Any rank."""
        self._stepped[id(optimizer)] = optimizer
        _mark(_gradients(optimizer), _BY_A_STEP)

    def _has_unsharded(self) -> bool:
        """Return whether a module of `fully_shard` holds gradients that it has not reduced yet."""
        modules = chain(*(part.modules() for part in self._parts))
        return any(holds_unsharded_gradients(module) for module in modules if isinstance(module, FSDPModule))


def _gradients(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in _spread(optimizer.param_groups):
        for parameter in _spread(group["params"]):
            if parameter.grad is not None:
                yield parameter.grad


def _spread(values: Sequence[Any]) -> Sequence[Any]:
    return values[:: max(1, len(values) // _SAMPLED)]


def _mark_of(gradient: torch.Tensor) -> str:
    return getattr(gradient, _MARK, "")


def _mark(gradients: Iterable[torch.Tensor], by: str) -> None:
    for gradient in gradients:
        with suppress(AttributeError):  # A subclass may take none.
            setattr(gradient, _MARK, by)


# A DataLoader that drew a seed from the generator that a load has restored, in the middle of an epoch.
#
# `iter` of torch's DataLoader draws a seed, and the first batch of a shuffled one draws another. An uninterrupted run
# did that before the save; a run that iterates after the load, and skips the earlier batches, does it again: all
# random numbers after that are others, and so is a shuffled order.
#
# It is reported only where it is sure: the seed is the one that the restored generator gives first; the steps say that
# the checkpoint is of the middle of an epoch, and that many batches were skipped; and something else has drawn, too. So
# it is not found in the last two steps of an epoch, nor if a sampler skips.


class LateSeedWatch:
    """Looks at the first two steps after a load. One rank."""

    def __init__(self) -> None:
        self._loaded: int | None = None
        self._states: tuple[torch.Tensor, ...] = ()
        self._seed = self._first_step = 0
        self._first: list[tuple[weakref.ref[Any], int]] = []
        """The iterators that drew the seed, and how many batches of each were taken at the first step."""

    def after_load(self, step: int) -> None:
        """Note what the generator that was just restored with `step` gives next."""
        before, generator = torch.get_rng_state(), torch.Generator()
        generator.set_state(before)
        self._seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))
        self._loaded, self._states, self._first = step, (before, generator.get_state()), []

    def at_step(self, step: int) -> None:
        """Warn if a loader drew that seed late."""
        if self._loaded is None:
            return
        if not self._first:
            self._first_step, self._first = step, self._found()
            if not self._first:
                self._loaded = None
            return
        loaded, self._loaded = self._loaded, None
        for iterator, taken in self._first:
            skipped = _skipped(iterator(), taken, self._first_step, step, loaded)
            if skipped:
                logger.warning(
                    "A DataLoader drew a seed from the random generator that the load of step %d restored, and "
                    "skipped %d batches: random numbers, as of dropout, and a shuffled order are not those of an "
                    "uninterrupted run. Give it a generator of its own, seeded with the number of each epoch, or if it "
                    "does not shuffle, make its iterator before load()",
                    loaded,
                    skipped,
                )
                return

    def _found(self) -> list[tuple[weakref.ref[Any], int]]:
        now = torch.get_rng_state()
        # Nothing has drawn, or a loader alone: no other number is changed by that.
        if any(now.equal(state) for state in self._states):
            return []
        return [(weakref.ref(each), num_yielded(each)) for each in loader_iterators() if self._seed in seeds_of(each)]


def _skipped(iterator: Any, taken: int, first_step: int, step: int, loaded: int) -> int:
    """Return how many batches were skipped to reach the place of step `loaded` in its epoch; 0 if that is not sure."""
    a_step = (num_yielded(iterator) - taken) / max(step - first_step, 1)
    skipped = taken - a_step * (first_step - loaded)
    try:
        place = a_step * loaded % max(len(iterator), 1)
    except TypeError:  # An iterable dataset has no length: more than a loop takes ahead is sure.
        place = 3
    return int(skipped) if a_step > 0 and skipped >= place > 0 else 0
