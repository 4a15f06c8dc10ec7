"""The model parts of a rank as one state dict under plain names.

`state_dict` calls the modules' own: most tensors that it returns are views of live ones, and a load
reads straight into them. What hooks or `get_extra_state` return may be copies, so a load is complete
only after `put_back` has given the complete dict to the modules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from torchtitan_lite.checkpoint.format.flattening import State, is_plain, refuse_expanded
from torchtitan_lite.checkpoint.format.key_report import TensorLike, compare_tensors
from torchtitan_lite.checkpoint.format.structure import FORM
from torchtitan_lite.checkpoint.state import fsdp1
from torchtitan_lite.checkpoint.state.names import (
    clean_names,
    is_extra_name,
    merge_disjoint,
    named_parameters,
    no_mixing,
    refuse_lazy,
)
from torchtitan_lite.checkpoint.state.other_keys import of_left_out, other_names, try_load
from torchtitan_lite.checkpoint.state.subclasses import (
    fill,
    forms_in,
    is_made_of_others,
    parts_below,
    with_parts_apart,
)
from torchtitan_lite.errors import CheckpointMismatch
from torchtitan_lite.torch_private import (
    buffers_of,
    load_alone,
    loads_in_its_own_way,
    version_of_module,
    without_children,
)


class _Raw(NamedTuple):
    """A model part with its own state dict, whose keys are divided, each with its plain name."""

    part: nn.Module
    entries: dict[str, Any]
    names: dict[str, str]
    """Of the keys in the state."""
    frozen: dict[str, str]
    """Of the parameters that are left out."""
    others: dict[str, str]
    """Of the other keys that are left out with them."""


class ModelWrapper:
    """All model parts of this rank as one `Stateful`: FQN to live tensor, or to a module's extra state.

    With `trained_only` it leaves out the parameters whose `requires_grad` is False, unless they were trained before, or
    loaded: no other place has the value of these.
    """

    def __init__(self, model_parts: nn.Module | Sequence[nn.Module], *, trained_only: bool = False) -> None:
        self.parts = [model_parts] if isinstance(model_parts, nn.Module) else list(model_parts)
        self.is_trained_only = trained_only
        self._trained: set[str] = set()
        """With `trained_only`, the parameters that were trained."""
        self._noted: set[int] = set()
        """The ids of those that were noted: almost always all that are given, at each step."""
        self._others_left_out: dict[str, Any] = {}
        """What the last `state_dict` left out with frozen parameters, such as the scales of a quantized base."""

    def state_dict(self) -> dict[str, Any]:
        """Return the modules' state dicts, merged, by plain name. **Collective** with FSDP1.

        Raises TypeError for an expanded tensor, which a load cannot write into, and ConfigError for a lazy module
        without shapes.
        """
        refuse_lazy(self.parts)
        raws = self._raw()
        state = merge_disjoint([{name: each.entries[key] for key, name in each.names.items()} for each in raws])
        state = with_parts_apart(state, "model")
        refuse_expanded(tensors_of(state))
        self._others_left_out = {name: each.entries[key] for each in raws for key, name in each.others.items()}
        return state

    def note_trainable(self) -> None:
        """With `trained_only`, keep the parameters whose `requires_grad` is True now in the state. Any rank."""
        if self.is_trained_only:
            self.note_trained([each for part in self.parts for each in part.parameters() if each.requires_grad])

    def note_trained(self, parameters: Iterable[torch.Tensor]) -> None:
        """With `trained_only`, keep `parameters` in the state even while their `requires_grad` is False. Any rank."""
        if not self.is_trained_only:
            return
        if new := {each for each in parameters if id(each) not in self._noted}:
            named = named_parameters(self.parts).items()
            self._trained |= {name for parameter, names in named if parameter in new for name in names}
            self._noted |= {id(each) for each in new}

    def keep(self, names: Collection[str]) -> None:
        """With `trained_only`, keep parameters with these `names` in the state, as those that were trained."""
        if self.is_trained_only:
            self._trained |= {*names, *forms_in(dict.fromkeys(names))}

    def left_out(self, names: Collection[str]) -> dict[str, Any]:
        """Return what of `names` the modules have and the state leaves out."""
        if not self._left_out():
            return {}
        left_out = ((each, each.frozen | each.others) for each in self._raw())
        return {name: raw.entries[key] for raw, left in left_out for key, name in left.items() if name in names}

    def parameter_names(self) -> set[str]:
        """Return the names in `state_dict` that are parameters; the rest is buffers and extra state."""
        named = named_parameters(self.parts).items()
        by_name = {name: each for each, names in named for name in names if name not in self._left_out()}
        return {name for name in with_parts_apart(by_name, "model") if not name.endswith(f".{FORM}")}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load `state_dict`, which must have exactly the tensors of `state_dict()`.

        Raises `CheckpointMismatch` before anything changes.
        """
        report = compare_tensors(expected=tensors_of(self.state_dict()), found=tensors_of(state_dict))
        if report:
            raise CheckpointMismatch("the model's state dict", str(report))
        self.put_back(state_dict)

    def put_back(self, state_dict: Mapping[str, Any]) -> None:
        """Give `state_dict`, which has the keys of `state_dict()`, to the modules' `load_state_dict`.

        Views of live tensors are not copied. Raises what hooks raise. **Collective** with FSDP1.
        """
        for raw in self._raw():
            # The module's own dict: load hooks read versions from its `_metadata`.
            made_of_others = {key for key, each in raw.entries.items() if is_made_of_others(each)}
            raw.entries.update({key: state_dict[name] for key, name in raw.names.items() if key not in made_of_others})
            for key in made_of_others & raw.names.keys():
                # Their class need not take what it gave: the parts are given to the live tensor.
                live = live_tensor(raw.part, key, raw.entries[key])
                fill(live, parts_below(raw.names[key], state_dict), f"model.{raw.names[key]}")
            with torch.no_grad(), fsdp1.sharded_state_dicts(raw.part), no_mixing(raw.part):
                _give(raw)

    def has_other_keys(self) -> bool:
        """Return whether a module may not take back what its `state_dict` returns. **Collective** with FSDP1."""
        return any(other_names(part, raw) for part, raw in self._raw_parts())

    def try_load(self) -> None:
        """Give the modules their own live state. Raises as the function `try_load`. **Collective** with FSDP1."""
        others = [name for part, raw in self._raw_parts() for name in other_names(part, raw)]
        try_load("model", self.parts, others, lambda: self.put_back(self.state_dict()), self._left_out())

    def resized(self, stored: Mapping[str, TensorLike]) -> dict[str, Any]:
        """Return new memory for buffers that `stored` has in another shape, if their modules load these.

        **Collective** with FSDP1.
        """
        state: dict[str, Any] = {}
        for raw in self._raw():
            of_part = {key: stored[name] for key, name in raw.names.items() if name in stored}
            found = resized_buffers(raw.part, raw.entries, of_part)
            state |= {raw.names[key]: value for key, value in found.items()}
        return state

    def _raw(self) -> list[_Raw]:
        raws = []
        left_out = self._left_out()
        for part, entries in self._raw_parts():
            names = clean_names(part, entries)
            merge_disjoint([{name: None} for name in names.values()])
            # Left out of the model's state, not of the save: plans, loads, comparisons and exports need no rule of
            # their own.
            others = of_left_out(part, names.values(), left_out) if left_out else ()
            frozen = {key: name for key, name in names.items() if name in left_out}
            with_them = {key: name for key, name in names.items() if name in others}
            of_state = {key: name for key, name in names.items() if key not in frozen and key not in with_them}
            raws.append(_Raw(part, entries, of_state, frozen, with_them))
        return raws

    def _raw_parts(self) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
        for part in self.parts:
            with torch.no_grad(), fsdp1.sharded_state_dicts(part):
                raw = part.state_dict()
            yield part, raw

    def frozen_names(self) -> set[str]:
        """Return the names of the parameters that are not trained, in the state or not."""
        named = named_parameters(self.parts).items()
        return {name for parameter, names in named if not parameter.requires_grad for name in names}

    def left_out_tensors(self) -> dict[str, torch.Tensor]:
        """Return the frozen parameters that are no part of the state, and what `state_dict` left out with them."""
        left_out = self._left_out()
        named = named_parameters(self.parts).items() if left_out else ()
        parameters = {name: parameter for parameter, names in named for name in names if name in left_out}
        return parameters | tensors_of(self._others_left_out)

    def _left_out(self) -> set[str]:
        """Return the names of frozen parameters if they are no part of the state."""
        return self.frozen_names() - self._trained if self.is_trained_only else set()


def _give(raw: _Raw) -> None:
    """Have the part load its entries, without those that are left out and that its load may refuse.

    A hook may count on the frozen parameters, but their class may have no `copy_`; and what a quantized base has next
    to them its own `load_state_dict` seldom accepts.
    """
    part, entries = raw.part, raw.entries
    kept_back = raw.others | {key: name for key, name in raw.frozen.items() if not is_plain(entries[key])}
    kept_back |= {key: name for key, name in raw.names.items() if is_made_of_others(entries[key])}
    for key in kept_back:
        del entries[key]
    if not kept_back:
        part.load_state_dict(entries)
        return
    found = part.load_state_dict(entries, strict=False)
    names = {*clean_names(part, [*found.missing_keys, *found.unexpected_keys]).values()}
    if lost := sorted(names - {*kept_back.values()}):
        raise RuntimeError(f"{type(part).__name__}.load_state_dict misses, or does not expect, {', '.join(lost)}")


def live_tensor(part: nn.Module, key: str, other: torch.Tensor) -> torch.Tensor:
    """Return the tensor of `part` called `key` in its state dict; `other` if that is what a hook made."""
    try:
        live = attrgetter(key)(part)
    except AttributeError:
        return other
    return live if type(live) is type(other) else other


def is_extra(name: str, value: Any) -> bool:
    """Return whether an entry of a model's state dict may have any shape: extra state, or no tensor."""
    return not isinstance(value, torch.Tensor) or is_extra_name(name)


def tensors_of(state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the entries of a model's state dict that have the same shapes in every run of the model."""
    kind = torch.Tensor
    return {name: value for name, value in state_dict.items() if isinstance(value, kind) and not is_extra_name(name)}


EXPORT_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""The values of `checkpoint.export_dtype`."""


def weights_only(model_state: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the model's state by bare FQN, floating-point tensors cast to `dtype`, all else unchanged. Any rank.

    The parts of a tensor that is made of others stay as they are: a cast scale would be of another tensor.
    """
    kept = tuple(f"{name}." for name in forms_in(model_state))
    return {
        fqn: value if kept and fqn.startswith(kept) else _cast_value(fqn, value, dtype)
        for fqn, value in model_state.items()
    }


def _cast_value(fqn: str, value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    is_cast = value.is_floating_point() and not is_extra(fqn, value) and "float4" not in f"{value.dtype}"
    return value.detach().to(dtype) if is_cast else value.detach()


# Buffers that a load finds in another shape or dtype than they were saved with.
#
# Observers of quantization, and other modules, give their buffers a shape when they see the first batch, and their own
# `_load_from_state_dict` takes buffers of any shape. Such a buffer is read into new memory, which the module then gets.
# Whether it takes that is tried on a copy before anything is read.


def resized_buffers(root: nn.Module, raw: State, stored: Mapping[str, TensorLike]) -> State:
    """Return new memory for the entries of `raw`, the state dict of `root`, that are buffers and fit no longer.

    `stored` has shapes and dtypes by the same keys. Leaves out what the module would not take.
    """
    found: State = {}
    for key, like in stored.items():
        own = raw.get(key)
        if type(own) is not torch.Tensor or (own.shape, own.dtype) == (like.shape, like.dtype):
            continue
        path, _, name = key.rpartition(".")
        try:
            module = root.get_submodule(path)
        except AttributeError:  # A key that a hook made.
            continue
        if name in buffers_of(module) and loads_in_its_own_way(module):
            found.setdefault(path, {})[name] = torch.empty(like.shape, dtype=like.dtype, device=own.device)
    return {
        f"{path}.{name}" if path else name: value
        for path, values in found.items()
        if _takes(root.get_submodule(path), raw, path, values)
        for name, value in values.items()
    }


def _takes(module: nn.Module, raw: State, path: str, values: State) -> bool:
    """Return whether `module`, without its children, loads `values` next to its other buffers. Changes nothing."""
    prefix = f"{path}." if path else ""
    own = {name: None if each is None else each.clone() for name, each in buffers_of(module).items()}
    probe = without_children(module, own)
    given = {f"{prefix}{name}": each for name, each in own.items() if f"{prefix}{name}" in raw}
    given |= {f"{prefix}{name}": torch.zeros_like(each) for name, each in values.items()}
    try:
        with torch.no_grad():
            errors = load_alone(probe, given, prefix, version_of_module(raw, path))
    except Exception:  # The comparison of all keys then names it.
        return False
    shapes = {name: None if each is None else each.shape for name, each in buffers_of(probe).items()}
    return not errors and all(shapes.get(name) == each.shape for name, each in values.items())
