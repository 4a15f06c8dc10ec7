"""Keys of a module's state dict that are neither parameters, persistent buffers nor extra state.

Hooks and a module's own code make them, and torch's `load_state_dict` accepts none. A module whose load is not made for
them would refuse every checkpoint of its run, so one with such keys, or without some of torch's, loads its own state
once before the first save of a start. What is tried is what a load does, on all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain

import torch
from torch import nn

from torchtitan_lite.checkpoint.format.file_data import elements_digest
from torchtitan_lite.checkpoint.format.flattening import is_plain
from torchtitan_lite.checkpoint.format.shards import local_of
from torchtitan_lite.checkpoint.state import fsdp1
from torchtitan_lite.checkpoint.state.names import SHOWN, clean_names, is_extra_name, with_clean_names
from torchtitan_lite.checkpoint.state.rng import RngState
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import listed
from torchtitan_lite.torch_private import non_persistent_buffers, versions_kept


def saved_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of `module` by plain name. FSDP1 may have other parameters."""
    modules = module.named_modules(remove_duplicate=False)
    unsaved = {f"{path}.{key}" if path else key for path, each in modules for key in non_persistent_buffers(each)}
    buffers = (each for each in module.named_buffers(remove_duplicate=False) if each[0] not in unsaved)
    return with_clean_names(module, dict(chain(module.named_parameters(remove_duplicate=False), buffers)))


def other_names(module: nn.Module, entries: Iterable[object]) -> list[str]:
    """Return the plain names of those of a state dict's keys, `entries`, that are not torch's, and of what it lacks."""
    known, flat = {*saved_tensors(module)}, fsdp1.flat_names(module)
    keys = [*entries]
    text = [key for key in keys if isinstance(key, str)]  # A state dict of the user's may have others.
    found = {name for name in clean_names(module, text).values() if not is_extra_name(name)}
    found |= {repr(key) for key in keys if not isinstance(key, str)}
    if flat:  # FSDP1 itself refuses a hook that takes a key out.
        return sorted(found - known - {*clean_names(module, flat).values()})
    return sorted(found ^ known)


def of_left_out(module: nn.Module, names: Collection[str], left_out: Collection[str]) -> set[str]:
    """Return those of `names`, all plain ones in a state dict, that only the parameters `left_out` need.

    Such a key is under the name of one of them, or its module has no other parameters. Where a key takes the place of a
    parameter, and not one next to it, a hook makes the parameter of it, and it stays.
    """
    others = {name for name in names if name not in left_out and not is_extra_name(name)}
    saved = saved_tensors(module) if others else {}
    others -= saved.keys()
    if not others:
        return set()
    modules = {*clean_names(module, (path for path, _ in module.named_modules(remove_duplicate=False))).values()}
    own: dict[str, set[str]] = {}
    for name, tensor in saved.items():
        if isinstance(tensor, nn.Parameter):
            own.setdefault(name.rpartition(".")[0], set()).add(name)
    there = {*left_out} & {*names}

    def is_needed_by_those(name: str) -> bool:
        place = name.rpartition(".")[0]
        while place not in modules:
            if place in left_out:
                return place in there
            place = place.rpartition(".")[0]
        return place in own and own[place] <= there

    return {name for name in others if is_needed_by_those(name)}


def try_load(
    state: str,
    modules: Sequence[nn.Module],
    others: Sequence[str],
    load: Callable[[], object],
    left_out: Collection[str] = (),
) -> None:
    """Call `load`, which gives `modules` what their `state_dict` returned; generators and versions stay as they are.

    Raises ConfigError, with the names `others` of what may be the cause, if it raises or changes one of their tensors
    that is not `left_out`.
    """
    first = listed(others, most=SHOWN)
    tensors = [each for module in modules for each in saved_tensors(module).values()]
    before, generators = _tensor_contents(modules, left_out), RngState().state_dict()
    try:
        with versions_kept([*tensors, *map(local_of, tensors)]):
            load()
    except Exception as error:
        why = re.sub(r"^Error\(s\) in loading state_dict for \w+: ", "", " ".join(str(error).split())).rstrip(".")
        raise ConfigError(
            f"{state}: load_state_dict refuses what state_dict returns ({first}): {type(error).__name__}: {why}. "
            "No start could load a checkpoint of this run. Have the two fit each other, or leave out what is frozen, "
            "such as a quantized base: --checkpoint.save_trained_only."
        ) from error
    finally:
        RngState().load_state_dict(generators)
    after = _tensor_contents(modules, left_out)
    if changed := [name for name, content in before.items() if after.get(name) != content]:
        raise ConfigError(
            f"{state}: load_state_dict changes {listed(changed, most=SHOWN)} when it gets what state_dict returned "
            f"({first}), as a load of a checkpoint would. Have the two fit each other. This process has the "
            "changed values: start again, from the last checkpoint if there is one."
        )


def _tensor_contents(modules: Sequence[nn.Module], left_out: Collection[str]) -> dict[str, tuple[object, ...]]:
    """Return what each saved tensor holds, as a digest, and of a trained one which object it is, for its optimizer."""
    return {
        name: (id(tensor) if tensor.requires_grad else 0, tensor.shape, tensor.dtype, _local_digest(tensor))
        for module in modules
        for name, tensor in saved_tensors(module).items()
        if name not in left_out
    }


def _local_digest(tensor: torch.Tensor) -> int:
    memory = local_of(tensor).detach()
    if not is_plain(memory) or memory.layout is not torch.strided or memory.is_quantized or memory.is_meta:
        return 0  # The save refuses most of these, by name.
    return elements_digest(memory)
