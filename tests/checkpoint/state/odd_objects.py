"""Modules and an optimizer whose state dict is not only their live tensors by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class ScaledLinear(nn.Linear):
    """Like Transformer Engine's modules: its scales are extra state, of a size that grows."""

    def __init__(self, form: str) -> None:
        super().__init__(3, 3)
        self.form, self.scales = form, torch.zeros(0)

    def get_extra_state(self) -> Any:
        if self.form == "tensor":
            return self.scales.clone()
        if self.form == "dict":
            return {"scales": self.scales.clone(), "recipe": {"margin": len(self.scales), "kind": "delayed"}}
        return len(self.scales)

    def set_extra_state(self, state: Any) -> None:
        if self.form == "tensor":
            self.scales = state
        elif self.form == "dict":
            self.scales = state["scales"]
            assert state["recipe"] == {"margin": len(self.scales), "kind": "delayed"}
        else:
            self.scales = torch.ones(state)


class FusedQkv(nn.Module):
    """One weight in memory, three in a state dict under the names of other models."""

    def __init__(self, *, copies: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.copies = copies
        self.loads = 0
        self.register_state_dict_post_hook(lambda *given: self._split(*given))
        self.register_load_state_dict_pre_hook(self._fuse)

    def _split(self, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for name, part in zip("qkv", state.pop(prefix + "weight").chunk(3), strict=True):
            state[f"{prefix}{name}.weight"] = part.clone() if self.copies else part

    def _fuse(self, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        self.loads += 1
        state[prefix + "weight"] = torch.cat([state.pop(f"{prefix}{name}.weight") for name in "qkv"])


class OwnForm(torch.optim.SGD):
    """An optimizer whose state dict does not have torch's form."""

    def state_dict(self) -> dict[str, Any]:
        buffers = [self.state[parameter].get("momentum_buffer") for parameter in self.param_groups[0]["params"]]
        return {"buffers": buffers, "lr": self.param_groups[0]["lr"], "version": 7}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["version"] == 7
        self.param_groups[0]["lr"] = state_dict["lr"]
        for parameter, buffer in zip(self.param_groups[0]["params"], state_dict["buffers"], strict=True):
            self.state[parameter]["momentum_buffer"] = buffer
