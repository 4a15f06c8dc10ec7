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


class QuantizedLinear(nn.Module):
    """Like bitsandbytes' `Linear4bit`: frozen, with a key for its scale that its `load_state_dict` refuses."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        weight = torch.randn(width, width)
        self.scale = weight.abs().max() / 127
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)
        self.register_state_dict_post_hook(lambda *given: self._add(*given))

    def _add(self, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        state[f"{prefix}weight.absmax"] = self.scale.detach()

    def dense(self) -> torch.Tensor:
        return self.weight.float() * self.scale

    def rescale(self) -> None:
        self.scale = self.scale * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.dense())


class ScaledBeside(QuantizedLinear):
    """Like bitsandbytes' `Linear8bitLt`: its scale is next to the weight, and its own load raises for it."""

    def _add(self, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        state[f"{prefix}SCB"] = self.scale.detach()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}SCB" in state_dict:
            raise RuntimeError("Loading a quantized checkpoint into a module that is not quantized")
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[no-untyped-call]  # torch's is not typed


class Packed(torch.Tensor):
    """Like torchao's tensors: a wrapper over others, which implements almost nothing."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Packed:
        made: Packed = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)  # type: ignore[attr-defined]  # torch's is not typed
        return made

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.packed, self.scale = data, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].packed, args[0].scale)
        raise NotImplementedError(f"{cls.__name__} dispatch: attempting to run unimplemented operator/function: {func}")


class PackedLinear(nn.Module):
    """A frozen weight of a wrapper class."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        data = torch.randint(-127, 127, (width, width), dtype=torch.int8)
        self.weight = nn.Parameter(Packed(data, torch.tensor(0.01)), requires_grad=False)

    def dense(self) -> torch.Tensor:
        weight: Any = self.weight
        return torch.Tensor(weight.packed.float() * weight.scale)

    def rescale(self) -> None:
        self.weight.scale.mul_(2)  # type: ignore[operator]  # an attribute of the wrapper

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.dense())
