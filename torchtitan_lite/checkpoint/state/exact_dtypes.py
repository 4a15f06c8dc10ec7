"""Keep the dtypes of an optimizer's state while the optimizer loads it.

`torch.optim.Optimizer` casts state to its parameter's dtype, which loses bits of moments in a higher precision, and
turns integers into floating-point numbers and strings into descriptions of generators. Hooks around its
`load_state_dict` put back what was given.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer


@contextmanager
def exact_dtypes(optimizer: Any, state_dict: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Within this context, have `optimizer.load_state_dict` keep the dtypes of the state that it loads.

    So do the optimizers that it wraps. The hooks run only within torch's own method: what an optimizer's own
    `load_state_dict` does after that holds. A `load_state_dict` that never calls torch's may cast as torch does: then
    tensors whose dtype in the optimizer's new state dict is not that of `state_dict` are put back.
    """
    held = [each for each in (optimizer, *vars(optimizer).values()) if isinstance(each, Optimizer)]
    noted: list[dict[str, Any]] = []
    with ExitStack() as stack:
        for each in held:
            # Some have no hooks: wrappers that do not call Optimizer.__init__.
            with suppress(AttributeError):
                noted.append(stack.enter_context(_exact_dtypes(each)))
        yield
    if state_dict is not None and isinstance(optimizer, Optimizer) and not any(noted):
        _put_back(optimizer, state_dict)


@contextmanager
def _exact_dtypes(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    given: dict[str, Any] = {}

    def note(_: Optimizer, state_dict: dict[str, Any]) -> None:
        given.update(state_dict)

    def restore(loaded: Optimizer) -> None:
        numbers = chain.from_iterable(group["params"] for group in given["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in loaded.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            own = loaded.state.get(parameter, {})
            for key, value in given["state"].get(number, {}).items():
                if key in own and key != "step":
                    own[key] = _with_dtypes_of(value, own[key])

    # The first after the user's own pre-hooks, the second before the user's own post-hooks.
    handles = (
        optimizer.register_load_state_dict_pre_hook(note),
        optimizer.register_load_state_dict_post_hook(restore, prepend=True),
    )
    try:
        yield given
    finally:
        for handle in handles:
            handle.remove()


def _put_back(optimizer: Optimizer, given: Mapping[str, Any]) -> None:
    """Put tensors of `given` in place of those that `optimizer` has, and returns in a state dict, in another dtype."""
    returned = optimizer.state_dict()["state"]
    numbers = chain.from_iterable(group["params"] for group in given["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=True):
        own = optimizer.state.get(parameter, {})
        for key, value in given["state"].get(number, {}).items():
            if key in own and own[key] is returned.get(number, {}).get(key):
                own[key] = _with_dtypes_of(value, own[key])


def _with_dtypes_of(given: Any, loaded: Any) -> Any:
    """Return `loaded`, with the tensors of `given` in place of those that have another dtype there.

    Strings, and the kinds of mappings, are also those of `given`: torch makes other strings, and dicts of all mappings.
    """
    if isinstance(given, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == given.dtype else given.to(loaded.device)
    if isinstance(given, dict) and isinstance(loaded, dict):
        same = copy.copy(given)
        same.clear()
        same.update({key: _with_dtypes_of(given.get(key), value) for key, value in loaded.items()})
        return same
    if type(given) in (list, tuple) and type(given) is type(loaded) and len(given) == len(loaded):
        return type(given)(_with_dtypes_of(*pair) for pair in zip(given, loaded, strict=True))
    return given if isinstance(given, str) and isinstance(loaded, str) else loaded
