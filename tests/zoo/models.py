"""Small models with features that checkpoints often get wrong, all built on one skeleton.

Every model is `down(middle(tanh(up(x))))`: `up` and `down` are what tensor parallelism cuts, and `middle` is
what the model is in the zoo for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

INPUT, OUTPUT, BATCH = 4, 2, 8
LATE = 5
"""The first step that uses a late part."""


class Subject(nn.Module):
    """The skeleton around `middle`. On a pipeline stage `up`, `middle` and `down` may be None."""

    def __init__(self, middle: Callable[[int], nn.Module], width: int) -> None:
        super().__init__()
        self.up: nn.Module | None = nn.Linear(INPUT, width)
        self.middle: nn.Module | None = middle(width)
        self.down: nn.Module | None = nn.Linear(width, OUTPUT)

    def forward(self, x: Tensor) -> Tensor:
        if self.up is not None:
            x = torch.tanh(self.up(x))
        if self.middle is not None:
            x = self.middle(x)
        return x if self.down is None else self.down(x)


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.there = nn.Linear(width, width)
        self.back = nn.Linear(width, width)
        self.back.weight = self.there.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.back(torch.tanh(self.there(x)))
        return y


class Recurrent(nn.Module):
    """An LSTM over a sequence of one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lstm(x[:, None])[0][:, 0]
        return y


class Attention(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 1, dim_feedforward=9, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x[:, None])[:, 0]
        return y


class ExtraTensor(nn.Module):
    """Extra state that is a tensor and changes the output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seen = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        y: Tensor = self.linear(x) * (1 + self.seen[0] / 100)
        return y

    def get_extra_state(self) -> Tensor:
        return self.seen.clone()

    def set_extra_state(self, state: Tensor) -> None:
        self.seen = state.clone()


class ExtraDict(nn.Module):
    """Extra state that is a dict with keys of several types."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.state: dict[Any, Any] = {"calls": 0, 7: [], "scales": {"in": torch.ones(2), (1, 2): None}, "none": {}}

    def forward(self, x: Tensor) -> Tensor:
        self.state["calls"] += 1
        self.state[7] = [*self.state[7], self.state["calls"]]
        y: Tensor = self.linear(x) * (1 + self.state["calls"] / 100)
        return y

    def get_extra_state(self) -> dict[Any, Any]:
        return dict(self.state)

    def set_extra_state(self, state: dict[Any, Any]) -> None:
        self.state = dict(state)


class Fused(nn.Module):
    """A fused weight that is two keys in the state dict, a common way to keep qkv compatible."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * width, width) / width)
        self.register_state_dict_post_hook(_split)
        self.register_load_state_dict_pre_hook(_join)

    def forward(self, x: Tensor) -> Tensor:
        one, two = (x @ self.weight.T).chunk(2, -1)
        return one * two


def _split(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    one, two = state.pop(f"{prefix}weight").chunk(2)
    state[f"{prefix}one"], state[f"{prefix}two"] = one.clone(), two.clone()


def _join(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if f"{prefix}one" in state:
        state[f"{prefix}weight"] = torch.cat([state.pop(f"{prefix}one"), state.pop(f"{prefix}two")])


class Buffers(nn.Module):
    """Buffers of many kinds; the persistent ones change in each forward pass."""

    average: Tensor
    calls: Tensor
    table: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("average", torch.zeros(width))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("none", None)
        self.register_buffer("table", torch.ones(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.table - self.average
        with torch.no_grad():
            self.average.lerp_(x.mean(0), 0.1)
            self.calls += 1
        return y


class Late(nn.Module):
    """A layer that has no gradient before step `LATE`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.early = nn.Linear(width, width)
        self.late = nn.Linear(width, width)
        self.is_late = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.early(x)
        return y + self.late(x) if self.is_late else y


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(9, width, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.table((x[:, 0].abs() * 8).long().clamp(max=8))
        return y


class OddSizes(nn.Module):
    """Sizes that no number of ranks divides: one row, and three."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.three = nn.Linear(width, 3, bias=False)
        self.back = nn.Linear(3, width)
        self.one = nn.Parameter(torch.ones(1, width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.back(self.three(x)) * self.one
        return y


class Empty(nn.Module):
    """A parameter without elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.empty = nn.Parameter(torch.zeros(0, width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y + self.empty.sum()


class Scalar(nn.Module):
    """A parameter of no dimensions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Precisions(nn.Module):
    """Parameters of several dtypes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.low = nn.Linear(width, width, dtype=torch.bfloat16)
        self.high = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.high(self.low(x.bfloat16()).double())
        return y.float()


class Convolution(nn.Module):
    """A weight whose memory is in another order than its dimensions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x[:, None, None].expand(-1, 2, 2, -1))
        return y.mean((1, 2))


class OddNames(nn.Module):
    """Names that also occur in the keys of optimizers and wrappers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.state = nn.ModuleDict({"step": nn.Linear(width, width), "exp_avg": nn.Linear(width, width)})
        self.param_groups = nn.ParameterList([torch.ones(width), torch.ones(width)])
        self.module = nn.ParameterDict({"lr": torch.ones(width), "0": torch.zeros(width)})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.state["exp_avg"](torch.tanh(self.state["step"](x)))
        return y * self.param_groups[0] * self.param_groups[1] * self.module["lr"] + self.module["0"]


def _frozen(width: int) -> nn.Module:
    return nn.Linear(width, width).requires_grad_(False)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "plain layers": lambda width: nn.Sequential(nn.Linear(width, width), nn.Tanh()),
    "tied weights": Tied,
    "BatchNorm": lambda width: nn.BatchNorm1d(width),
    "Dropout": lambda width: nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3)),
    "LSTM": Recurrent,
    "TransformerEncoderLayer": Attention,
    "weight_norm": lambda width: weight_norm(nn.Linear(width, width)),
    "spectral_norm": lambda width: spectral_norm(nn.Linear(width, width)),
    "extra state, a tensor": ExtraTensor,
    "extra state, a dict": ExtraDict,
    "state-dict hooks": Fused,
    "buffers": Buffers,
    "frozen parameters": _frozen,
    "late-used parameters": Late,
    "sparse Embedding": Sparse,
    "odd sizes": OddSizes,
    "an empty parameter": Empty,
    "a scalar parameter": Scalar,
    "several dtypes": Precisions,
    "channels last": Convolution,
    "odd names": OddNames,
}


def set_step(model: nn.Module, step: int) -> None:
    """Set the step in the late parts of `model`."""
    for module in model.modules():
        if isinstance(module, Late):
            module.is_late = step >= LATE
