"""Tensors and an optimizer in a few bits, in the form of the libraries that have them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from torchtitan_lite.checkpoint.format.shards import local_of

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

    def same(self) -> EightBits:
        return type(self)(self.codes, self.scale, self.settings)

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
        if func is torch.ops.aten.detach.default or (
            func is torch.ops.aten.view.default and tuple(args[1]) == tuple(args[0].shape)
        ):
            return args[0].same()
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            new = cls.of(args[1].dense() if isinstance(args[1], cls) else args[1], args[0].settings)
            args[0].codes.copy_(new.codes)
            args[0].scale.copy_(new.scale)
            return args[0]
        dense: Callable[[Any], Any] = lambda value: value.dense() if isinstance(value, cls) else value  # noqa: E731
        return func(*tree_map(dense, args), **tree_map(dense, kwargs or {}))


class OptimStateFp8(EightBits):
    """In the form of torchao's: codes like the tensor, and a scale for each block."""

    @classmethod
    def of(cls, tensor: torch.Tensor, settings: Any = None) -> EightBits:
        blocks = tensor.detach().reshape(-1, BLOCK)
        scale = blocks.abs().amax(dim=1).clamp(min=1e-12) / 448
        return cls((blocks / scale[:, None]).view(tensor.shape).to(torch.float8_e4m3fn), scale)


class WithMap(EightBits):
    """A tensor whose codes are places in a map; torchao keeps such states with 8 bits and with 4."""

    qmap: torch.Tensor
    per_byte = 1
    whole: torch.Size

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, qmap: torch.Tensor, whole: torch.Size) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, whole, dtype=torch.float32)  # type: ignore[attr-defined,no-untyped-call]
        made.codes, made.scale, made.qmap, made.whole = codes, scale, qmap, whole
        return made

    @classmethod
    def of(cls, tensor: torch.Tensor, settings: Any = None) -> Any:
        qmap = torch.linspace(-1, 1, 256 if cls.per_byte == 1 else 16)
        blocks = tensor.detach().reshape(-1, BLOCK)
        scale = blocks.abs().amax(dim=1).clamp(min=1e-12)
        places = ((blocks / scale[:, None]).reshape(-1, 1) - qmap).abs().argmin(dim=1).to(torch.uint8)
        codes = places.view(tensor.shape) if cls.per_byte == 1 else places[::2] << 4 | places[1::2]
        return cls(codes, scale, qmap, tensor.shape)

    def dense(self) -> torch.Tensor:
        places = self.codes.reshape(-1)
        if self.per_byte == 2:
            places = torch.stack([places >> 4, places & 15], dim=1).reshape(-1)
        return (self.qmap[places.int()].reshape(-1, BLOCK) * self.scale[:, None]).view(self.whole)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale", "qmap"], [True, self.whole]

    def same(self) -> Any:
        return type(self)(self.codes, self.scale, self.qmap, self.whole)


class OptimState8bit(WithMap):
    pass


class OptimState4bit(WithMap):
    per_byte = 2


class Momentum8(torch.optim.Optimizer):
    """SGD whose momentum has 8 bits, for parameters with whole blocks of elements."""

    def __init__(
        self, parameters: Any, lr: float = 0.1, settings: Any = None, kind: type[EightBits] = EightBits
    ) -> None:
        super().__init__(parameters, {"lr": lr})
        self.settings, self.kind = settings, kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, local = self.state[parameter], local_of(parameter)
                before = local_of(state["momentum"]) if "momentum" in state else torch.zeros_like(local)
                now = 0.9 * (before.dense() if isinstance(before, EightBits) else before) + local_of(parameter.grad)
                is_whole = now.numel() % (self.settings or Settings()).block == 0 and now.numel() > 0
                state["momentum"] = _like(parameter, self.kind.of(now, self.settings) if is_whole else now)
                local.add_(now, alpha=-float(group["lr"]))


def _like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return `local`, sharded as `parameter`."""
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=parameter.stride())
