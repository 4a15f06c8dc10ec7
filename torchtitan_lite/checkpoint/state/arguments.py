"""Checks of the objects that a manager is made from, in every form that people have them in.

A model is one module or a list of them, an optimizer or a scheduler one, a list, or none. A wrong
argument would show at the first save, hours later, or never: a dataloader without a state begins its data
again at each restart, and no save says so. Each is one sentence of `ConfigError` here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from torchtitan_lite.checkpoint.format.flattening import refuse_piece
from torchtitan_lite.checkpoint.schedule.interval import SavePolicy
from torchtitan_lite.checkpoint.state import fsdp1
from torchtitan_lite.config.job_config import EXCLUDABLE_STATES, Checkpoint, JobConfig
from torchtitan_lite.distributed.tried_torch import refuse_stuck_stream
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import logger

_IN_ANOTHER_PLACE = (nn.Module, Optimizer, LRScheduler, JobConfig)
_METHODS = ("state_dict", "load_state_dict")


def check_arguments(dataloader: Any, states: Any, job_config: Any) -> None:
    """Raise ConfigError if one of these is not what its parameter takes."""
    if not isinstance(job_config, JobConfig):
        raise ConfigError(f"job_config: expected a JobConfig, found {_typed(job_config)}. Name the arguments.")
    _refuse_dataloader(dataloader)
    _refuse_states(states)
    for name, each in {"dataloader": dataloader, **(states or {})}.items():
        for stream in (each, getattr(each, "dataset", None)):
            refuse_stuck_stream(name, stream)
        _warn_if_order_is_lost(name, each)
    _check_exclusions(job_config.checkpoint.exclude_from_loading, states or {})


def check_policies(save_policy: object, retention: object, state_owner: object) -> None:
    """Raise ConfigError unless each is None or what its parameter takes, which would show only at a save."""
    if save_policy is not None and not isinstance(save_policy, SavePolicy):
        raise ConfigError(
            f"save_policy: expected a SavePolicy, found {_typed(save_policy)}. Derive its class from SavePolicy of "
            "torchtitan_lite.checkpoint, and give an object of it."
        )
    if retention is not None and (isinstance(retention, type) or not callable(getattr(retention, "rulings", None))):
        raise ConfigError(
            f"retention: expected an object with a method rulings, found {_typed(retention)}. RetentionPolicy of "
            "torchtitan_lite.checkpoint describes it."
        )
    if state_owner is not None and not callable(state_owner):
        raise ConfigError(
            f"state_owner: expected a function, found {_typed(state_owner)}. Give one that takes the name of a "
            "parameter and a number of ranks, and returns the rank that has its optimizer state, or None."
        )


def refuse_dry_run(config: Checkpoint) -> None:
    """Raise ConfigError if a loop loads, trains or saves although `dry_run` is set."""
    if config.dry_run:
        raise ConfigError(
            "checkpoint.dry_run: nothing is loaded, trained or saved under it. Print manager.dry_run() in place of the "
            "loop, or leave checkpoint.dry_run out."
        )


def checked_step(call: str, given: object, least: int = 0) -> int:
    """Return the step that `call` was given, as a number; raise ConfigError unless it is a whole one from `least`.

    A folder of another name would be no checkpoint to any later start.
    """
    return _whole_number(f"{call}: expected a step, a", given, least)


def checked_rollback(reason: object, most: object, num_steps: object) -> tuple[int, int]:
    """Return the two limits that `roll_back` was given; raise ConfigError unless they and the `reason` are of use."""
    if not isinstance(reason, str):
        raise ConfigError(f"roll_back: reason: expected a text, such as 'loss is nan', found {reason!r:.100}.")
    most_rollbacks = _whole_number("roll_back: max_rollbacks: expected a", most, 1)
    return most_rollbacks, _whole_number("roll_back: within_steps: expected a", num_steps, 1)


def _whole_number(expected: str, given: Any, least: int) -> int:
    try:
        number = least - 1 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        number = least - 1
    if number < least:
        raise ConfigError(f"{expected} whole number from {least}, found {given!r:.100}.")
    return number


def model_parts(given: object) -> list[nn.Module]:
    """Return the modules of `model_parts`; raise ConfigError for anything else.

    Also for FSDP1 without a mesh, and for parameters that are pieces of larger tensors.
    """
    if isinstance(given, Mapping) and not isinstance(given, nn.Module):
        raise ConfigError(
            f"model: expected a module or a list of modules, found {_typed(given)}. Put several models into an "
            "nn.ModuleDict, and give their optimizers as a list."
        )
    parts: list[nn.Module] = _listed("model", "a module", given, lambda each: isinstance(each, nn.Module))
    if not parts:
        raise ConfigError("model: expected a module or a list of them, found none.")
    fsdp1.refuse_without_mesh(parts)
    _refuse_pieces(parts)
    return parts


def _refuse_pieces(parts: Sequence[nn.Module]) -> None:
    for part in parts:
        for name, tensor in chain(part.named_parameters(), part.named_buffers()):
            try:
                refuse_piece(f"model: {name}", tensor)
            except TypeError as error:
                raise ConfigError(str(error)) from None


def optimizers(given: object) -> list[Optimizer]:
    """Return the optimizers: those of `torch.optim`, and objects with a state and parameter groups like theirs."""
    methods = (*_METHODS, "param_groups", "step")
    found: list[Optimizer] = _listed("optimizer", "an optimizer", given, lambda each: _has(each, methods, nn.Module))
    for at, each in enumerate(found):
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(each).__mro__):
            raise ConfigError(
                f"optimizer[{at}]: a ZeroRedundancyOptimizer has the state of each parameter on one rank only, and no "
                "rank returns its own. Use fully_shard, which shards that state too, or a plain optimizer with DDP."
            )
    return found


def lr_schedulers(given: object) -> list[LRScheduler]:
    """Return the schedulers: those of `torch.optim.lr_scheduler`, and objects with a state and a `step` method."""
    methods, others = (*_METHODS, "step"), (nn.Module, Optimizer)
    return _listed("lr_scheduler", "a scheduler", given, lambda each: _has(each, methods, others))


def refuse_without_state(given: object) -> None:
    """Raise ConfigError if `PerRank` was given neither a state nor a plain dict."""
    if not (isinstance(given, dict) or _has_state_methods(given)):
        raise ConfigError(
            f"PerRank: {_typed(given)} has no state_dict and load_state_dict. Put it into an object that has both, or "
            "into a plain dict."
        )


def _refuse_dataloader(dataloader: Any) -> None:
    if isinstance(dataloader, (*_IN_ANOTHER_PLACE, Mapping, list, tuple)):
        raise ConfigError(f"dataloader: expected an object with a state, or None, found {_typed(dataloader)}.")
    if dataloader is None or _has_state_methods(dataloader):
        return
    instead = (
        "Use torchdata's StatefulDataLoader, which takes the same arguments, and give "
        "torchtitan_lite.data.StatefulDataLoaderAdapter(loader, rank=0, num_ranks=1), with its rank and the number "
        "of ranks where there are several"
        if isinstance(dataloader, DataLoader)
        else "Give it state_dict and load_state_dict"
    )
    raise ConfigError(
        f"dataloader: {_typed(dataloader)} has no state, so a resume would start the data from the beginning. "
        f"{instead}; or give None, if the data may start again."
    )


def _refuse_states(states: Any) -> None:
    if states is None:
        return
    if not isinstance(states, Mapping):
        raise ConfigError(f"states: expected a dict of names and states, found {_typed(states)}.")
    for name, state in states.items():
        if not isinstance(name, str):
            raise ConfigError(f"states: expected strings as names, found {name!r}. Give the state a name.")
        if isinstance(state, dict) and not _has_state_methods(state):
            for key, value in state.items():
                if _has_state_methods(value):
                    raise ConfigError(
                        f"states: {name!r} is a dict with {_typed(value)} under {key!r}, whose own state would not be "
                        f"saved. Give it as a state of its own: {{{f'{name}_{key}'!r}: ...}}."
                    )
        elif not _has_state_methods(state):
            raise ConfigError(
                f"states: {name!r} is {_typed(state)}, which has no state_dict and load_state_dict. Put a value into a "
                f"dict, which is saved and restored in place: {{{name!r}: {{'value': ...}}}}."
            )


def _warn_if_order_is_lost(name: str, loader: Any) -> None:
    """Warn of torchdata's StatefulDataLoader if the order that its sampler draws is not in its state, and of a stream.

    A stream of Hugging Face begins all iterations of an epoch number at the position that it was given for it.
    """
    if any(kind.__module__ == "datasets.iterable_dataset" for kind in type(loader).__mro__):
        logger.warning(
            "%s: after a resume, each further epoch of a datasets.IterableDataset begins at the position of the "
            "checkpoint too, unless set_epoch gives every epoch its number. Put it into a HuggingFaceStreamAdapter "
            "(torchtitan_lite.data), which does that",
            name,
        )
    if not any(kind.__name__ == "StatefulDataLoader" for kind in type(loader).__mro__):
        return
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while isinstance(sampler, BatchSampler):
        sampler = sampler.sampler
    is_of_torchdata = type(sampler).__module__.startswith("torchdata.")
    has_order = is_of_torchdata or isinstance(sampler, SequentialSampler | DistributedSampler)
    if has_order or hasattr(sampler, "state_dict") or isinstance(loader.dataset, IterableDataset):
        return
    logger.warning(
        "%s: the order that a %s draws is not in the state of a StatefulDataLoader, so a resumed run may skip samples "
        "and repeat others. Put the loader into a StatefulDataLoaderAdapter (torchtitan_lite.data), which keeps it",
        name,
        type(sampler).__name__,
    )


def _check_exclusions(excluded: Sequence[str], states: Mapping[str, Any]) -> None:
    known = sorted({*EXCLUDABLE_STATES, *states})
    for name in excluded:
        if name not in known:
            raise ConfigError(
                f"checkpoint.exclude_from_loading: there is no state {name!r}. Expected some of {', '.join(known)}."
            )


def _has_state_methods(value: Any) -> bool:
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in _METHODS)


def _typed(value: Any) -> str:
    name = value.__name__ if isinstance(value, type) else type(value).__name__
    return f"the class {name}" if isinstance(value, type) else f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def _has(value: object, names: Sequence[str], others: Any) -> bool:
    return not isinstance(value, others) and all(hasattr(value, name) for name in names)


def _listed(argument: str, one: str, given: Any, is_one: Callable[[object], bool]) -> list[Any]:
    """Return the objects in `given`, which is one, some or None. Raise ConfigError unless each of them is `one`."""
    is_single = hasattr(given, "state_dict")
    found = [] if given is None else [given] if is_single else given
    if isinstance(found, str | bytes | Mapping) or not isinstance(found, Iterable):
        raise ConfigError(f"{argument}: expected {one} or a list of them, found {_typed(given)}.")
    for at, each in enumerate(found := [*found]):
        if not is_one(each):
            name = argument if is_single else f"{argument}[{at}]"
            raise ConfigError(f"{name}: expected {one}, found {_typed(each)}.")
    return found
