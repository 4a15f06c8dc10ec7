"""Warn of state that training changes and no checkpoint has.

Torch leaves buffers that are not persistent, and random generators in attributes, out of a state dict. Most are tables
or caches; if the run depends on one, a resume is another run. The first save notes them, the second compares.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from torchtitan_lite.log import logger
from torchtitan_lite.torch_private import non_persistent_buffers

_SAMPLED = 1024
"""Elements of a buffer that are compared: tables of positions are long, and a change of one is a change of all."""
_SHOWN = 4
_GENERATORS = frozenset({torch.Generator, random.Random, np.random.Generator, np.random.RandomState})


class UnsavedWatch:
    """Watches `modules`, by name of their state, and `optimizers`."""

    def __init__(self, modules: Mapping[str, Sequence[nn.Module]], optimizers: Sequence[Any]) -> None:
        self._modules = modules
        self._optimizers = list(optimizers)
        self._before: dict[str, Any] | None = None
        self._is_done = False

    def look(self) -> None:
        """Note what is unsaved, or at the second call log one warning that names what has changed since the first."""
        if self._is_done:
            return
        now = dict(self._samples())
        if self._before is None:
            self._before, self._is_done = now, not now
            return
        self._is_done = True
        changed = [name for name, value in now.items() if name in self._before and value != self._before[name]]
        if changed:
            more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
            logger.warning(
                "Training changes %s%s, which no checkpoint has: a resumed run begins with the initial value. If the "
                "run depends on it, register the buffer with persistent=True, or save the generator in a state",
                ", ".join(changed[:_SHOWN]),
                more,
            )

    def _samples(self) -> Iterator[tuple[str, Any]]:
        for state, parts in self._modules.items():
            for part in parts:
                for path, module in part.named_modules():
                    name = f"{state}.{path}" if path else state
                    yield from _of_buffers(name, module)
                    yield from _of_generators(name, module)
        for number, optimizer in enumerate(self._optimizers):
            yield from _of_generators(f"optimizers[{number}]", optimizer)


def _of_buffers(name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    names = non_persistent_buffers(module)
    buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False)) if names else {}
    for key in names:
        buffer = buffers.get(key)
        if type(buffer) is torch.Tensor and buffer.layout is torch.strided and not buffer.is_meta and buffer.numel():
            # As bytes: NaN is not equal to itself.
            sample = buffer.detach().reshape(-1)[:_SAMPLED].resolve_conj().resolve_neg().cpu().contiguous()
            yield f"{name}.{key}", (buffer.dtype, buffer.shape, sample.view(torch.uint8).tolist())


def _of_generators(name: str, owner: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(owner, nn.Module) and type(owner).get_extra_state is not nn.Module.get_extra_state:
        return  # Its extra state may have them.
    if isinstance(owner, Optimizer) and type(owner).state_dict is not Optimizer.state_dict:
        return  # So may its state dict.
    # By the type itself: a look at all attributes of 700 modules is a part of a save.
    own = [(key, value) for key, value in getattr(owner, "__dict__", {}).items() if type(value) in _GENERATORS]
    for key, value in own:
        if isinstance(value, torch.Generator):
            yield f"{name}.{key}", value.get_state().tolist()
        elif isinstance(value, random.Random):
            yield f"{name}.{key}", value.getstate()
        elif isinstance(value, np.random.Generator):
            yield f"{name}.{key}", repr(value.bit_generator.state)
        elif isinstance(value, np.random.RandomState):
            legacy: Any = value.get_state()
            yield f"{name}.{key}", (legacy[1].tolist(), legacy[2:])
