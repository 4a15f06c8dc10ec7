"""Tensors and an optimizer in a few bits, in the form of the libraries that have them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

BLOCK = 4


class Rounding(enum.Enum):
    NEAREST = 1
    DOWN = 2


@dataclass(frozen=True)
class Settings:
    block: int = BLOCK
    rounding: Rounding = Rounding.NEAREST
    device: str = "cpu"


class EightBits(torch.Tensor):
    """A float tensor as codes of 8 bits, and a scale for each block of its row-major elements."""

    codes: torch.Tensor
    scale: torch.Tensor
    settings: Any

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, settings: Any = None) -> EightBits:
        made: EightBits = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined,no-untyped-call]
        made.codes, made.scale, made.settings = codes, scale, settings or Settings()
        return made

    @classmethod
    def of(cls, tensor: torch.Tensor, settings: Any = None) -> EightBits:
        blocks = tensor.detach().reshape(-1, (settings or Settings()).block)
        scale = blocks.abs().amax(dim=1).clamp(min=1e-12) / 127
        codes = (blocks / scale[:, None]).round().to(torch.int8).view(tensor.shape)
        return cls(codes, scale, settings)

    def dense(self) -> torch.Tensor:
        blocks = self.codes.reshape(-1, self.settings.block).float() * self.scale[:, None]
        return blocks.view(self.codes.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.settings]

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, *_: Any) -> EightBits:
        return EightBits(inner["codes"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            made = (func(args[0].codes), func(args[0].scale), args[0].settings)
            return cls(*made)
        if func is torch.ops.aten.view.default and tuple(args[1]) == tuple(args[0].shape):
            return cls(args[0].codes, args[0].scale, args[0].settings)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            new = cls.of(args[1].dense() if isinstance(args[1], cls) else args[1], args[0].settings)
            args[0].codes.copy_(new.codes)
            args[0].scale.copy_(new.scale)
            return args[0]
        dense: Callable[[Any], Any] = lambda value: value.dense() if isinstance(value, cls) else value  # noqa: E731
        return func(*tree_map(dense, args), **tree_map(dense, kwargs or {}))


class Momentum8(torch.optim.Optimizer):
    """SGD whose momentum has 8 bits, for parameters with whole blocks of elements."""

    def __init__(self, parameters: Any, lr: float = 0.1, settings: Any = None) -> None:
        super().__init__(parameters, {"lr": lr})
        self.settings = settings

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                before = state.get("momentum", torch.zeros_like(parameter))
                dense = before.dense() if isinstance(before, EightBits) else before
                now = 0.9 * dense + parameter.grad
                whole = parameter.numel() % (self.settings or Settings()).block == 0
                state["momentum"] = EightBits.of(now, self.settings) if whole else now
                parameter.add_(now, alpha=-group["lr"])
