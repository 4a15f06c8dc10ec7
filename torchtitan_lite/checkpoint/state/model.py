"""The model parts of a rank as one state dict under plain names.

`state_dict` calls the modules' own: most tensors that it returns are views of live ones, and a load
reads straight into them. What hooks or `get_extra_state` return may be copies, so a load is complete
only after `put_back` has given the complete dict to the modules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchtitan_lite.checkpoint.format.key_report import TensorLike, compare_tensors
from torchtitan_lite.checkpoint.format.kinds import refuse_expanded
from torchtitan_lite.checkpoint.state import fsdp1
from torchtitan_lite.checkpoint.state.in_place import no_mixing
from torchtitan_lite.checkpoint.state.names import (
    EXTRA_STATE,
    clean_names,
    merge_disjoint,
    named_parameters,
    refuse_lazy,
)
from torchtitan_lite.checkpoint.state.resized import resized_buffers
from torchtitan_lite.errors import CheckpointMismatch


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

    def state_dict(self) -> dict[str, Any]:
        """Return the modules' state dicts, merged, by plain name. **Collective** with FSDP1.

        Raises TypeError for an expanded tensor, which a load cannot write into, and ConfigError for a lazy module
        without shapes.
        """
        refuse_lazy(self.parts)
        state = merge_disjoint([{name: raw[key] for key, name in names.items()} for _, raw, names in self._raw()])
        refuse_expanded(tensors_of(state))
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
            self._trained |= {*names}

    def left_out(self, names: Collection[str]) -> dict[str, Any]:
        """Return what of `names` the modules have and the state leaves out."""
        wanted = self._left_out() & {*names}
        if not wanted:
            return {}
        everything = ((raw, clean_names(part, raw)) for part, raw in self._raw_parts())
        return {names[key]: value for raw, names in everything for key, value in raw.items() if names[key] in wanted}

    def parameter_names(self) -> set[str]:
        """Return the names in `state_dict` that are parameters; the rest is buffers and extra state."""
        return {name for names in named_parameters(self.parts).values() for name in names} - self._left_out()

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
        for part, raw, names in self._raw():
            # The module's own dict: load hooks read versions from its `_metadata`.
            raw.update({key: state_dict[name] for key, name in names.items()})
            with torch.no_grad(), fsdp1.sharded_state_dicts(part), no_mixing(part):
                part.load_state_dict(raw)

    def resized(self, stored: Mapping[str, TensorLike]) -> dict[str, Any]:
        """Return new memory for buffers that `stored` has in another shape, if their modules load these.

        **Collective** with FSDP1.
        """
        state: dict[str, Any] = {}
        for part, raw, names in self._raw():
            of_part = {key: stored[name] for key, name in names.items() if name in stored}
            state |= {names[key]: value for key, value in resized_buffers(part, raw, of_part).items()}
        return state

    def _raw(self) -> list[tuple[nn.Module, dict[str, Any], dict[str, str]]]:
        """Return each part with its own state dict, and the plain name of each of its keys."""
        dicts = []
        left_out = self._left_out()
        for part, raw in self._raw_parts():
            names = clean_names(part, raw)
            merge_disjoint([{name: None} for name in names.values()])
            # Left out of the model's state, not of the save: plans, loads, comparisons and exports need no rule of
            # their own.
            names = {key: name for key, name in names.items() if name not in left_out}
            dicts.append((part, raw, names))
        return dicts

    def _raw_parts(self) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
        for part in self.parts:
            with torch.no_grad(), fsdp1.sharded_state_dicts(part):
                raw = part.state_dict()
            yield part, raw

    def frozen_names(self) -> set[str]:
        """Return the names of the parameters that are not trained, in the state or not."""
        named = named_parameters(self.parts).items()
        return {name for parameter, names in named if not parameter.requires_grad for name in names}

    def left_out_parameters(self) -> dict[str, torch.Tensor]:
        """Return the frozen parameters that are no part of the state."""
        left_out = self._left_out()
        named = named_parameters(self.parts).items() if left_out else ()
        return {name: parameter for parameter, names in named for name in names if name in left_out}

    def _left_out(self) -> set[str]:
        """Return the names of frozen parameters if they are no part of the state."""
        return self.frozen_names() - self._trained if self.is_trained_only else set()


def is_extra(name: str, value: Any) -> bool:
    """Return whether an entry of a model's state dict may have any shape: extra state, or no tensor."""
    return not isinstance(value, torch.Tensor) or is_extra_name(name)


def is_extra_name(name: str) -> bool:
    """Return whether an entry of a model's state dict with this name is a module's extra state."""
    return name.endswith(EXTRA_STATE) and name.rpartition(".")[2] == EXTRA_STATE


def tensors_of(state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the entries of a model's state dict that have the same shapes in every run of the model."""
    kind = torch.Tensor
    return {name: value for name, value in state_dict.items() if isinstance(value, kind) and not is_extra_name(name)}


EXPORT_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""The values of `checkpoint.export_dtype`."""


def weights_only(model_state: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the model's state by bare FQN, floating-point tensors cast to `dtype`, all else unchanged. Any rank."""
    return {fqn: _cast(fqn, value, dtype) for fqn, value in model_state.items()}


def _cast(fqn: str, value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach() if is_extra(fqn, value) or not value.is_floating_point() else value.detach().to(dtype)
