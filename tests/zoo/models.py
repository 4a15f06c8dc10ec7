"""Small models with features that checkpoints often get wrong, all built on one skeleton, and their wrappers.

Every model is `down(middle(tanh(up(x))))`: `up` and `down` are what tensor parallelism cuts, and `middle` is
what the model is in the zoo for. Each wrapper has the number of processes that it runs on here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

INPUT, OUTPUT, BATCH = 4, 2, 8
EVEN, UNEVEN = 8, 7
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


class Keyed(nn.Module):
    """A tensor that is no buffer and changes the output, and that hooks save and load under a key of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = torch.ones(())
        self.register_state_dict_post_hook(_add_scale)
        self.register_load_state_dict_pre_hook(_take_scale)

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale * 1.01
        y: Tensor = self.linear(x) * self.scale
        return y


def _add_scale(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}scale"] = module.scale


def _take_scale(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if f"{prefix}scale" in state:
        module.scale = state.pop(f"{prefix}scale").clone()


class Quantized(nn.Module):
    """A frozen base, the same in each start, with a key next to its weight that its load refuses, as bitsandbytes'."""

    def __init__(self, width: int) -> None:
        super().__init__()
        weight = torch.randn(width, width, generator=torch.Generator().manual_seed(0))
        self.scale = weight.abs().max() / 127
        self.weight = nn.Parameter((weight / self.scale).round(), requires_grad=False)
        self.register_state_dict_post_hook(_add_absmax)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T * self.scale


def _add_absmax(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}weight.absmax"] = module.scale


class Attributed(nn.Module):
    """A buffer with a tensor in an attribute, which changes the output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("table", torch.ones(width))
        self.table: Any
        self.table.scale = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        self.table.scale = self.table.scale * 1.01
        y: Tensor = self.linear(x) * self.table * self.table.scale
        return y


class Whole(Tensor):
    """Has whole numbers only, once it was copied into."""

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        return super().copy_(source.round(), non_blocking)


class Rounding(nn.Module):
    """A buffer of a class whose `copy_` rounds."""

    average: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("average", torch.zeros(width).as_subclass(Whole))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) - self.average.as_subclass(Tensor)
        with torch.no_grad():
            self.average.lerp_(x.mean(0), 0.1)
        return y


def _frozen(width: int) -> nn.Module:
    return nn.Linear(width, width).requires_grad_(False)


TRAINED_ONLY = "a quantized base, with `save_trained_only`"
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
    "a key that a hook adds": Keyed,
    TRAINED_ONLY: Quantized,
    "a quantized base": Quantized,
    "a tensor in an attribute": Attributed,
    "a class with its own `copy_`": Rounding,
}
ALONE = ("a quantized base", "a tensor in an attribute", "a class with its own `copy_`")
"""Models that are refused, or warned of, whatever they are combined with."""


def set_step(model: nn.Module, step: int) -> None:
    """Set the step in the late parts of `model`."""
    for module in model.modules():
        if isinstance(module, Late):
            module.is_late = step >= LATE


def loss_of(output: Tensor) -> Tensor:
    """Return the loss of `output`."""
    return output.float().square().mean()


class Wrapped:
    """A model as it is trained: `module` goes to the optimizer and the manager."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def forward_backward(self, batch: Tensor, scale: Callable[[Tensor], Tensor]) -> float:
        """Add the gradients of `scale(loss)`; return the loss."""
        loss = loss_of(self.module(batch))
        scale(loss).backward()
        return float(loss.detach())


class Stage(Wrapped):
    """Half of a model: the rank's stage of a pipeline of two."""

    def __init__(self, model: Subject) -> None:
        rank = dist.get_rank()
        width = model.down.in_features  # type: ignore[union-attr]  # not None before the model is cut
        if rank == 0:
            model.down = None
            model.middle = None
        else:
            model.up = None
        super().__init__(model)
        # With examples torch does not find the shapes by a forward pass on garbage, which would change buffers. All but
        # the input require gradients: torch sends back only the gradients that the examples require.
        examples = [
            torch.empty(BATCH // 2, size, requires_grad=at > 0) for at, size in enumerate((INPUT, width, OUTPUT))
        ]
        stage = PipelineStage(model, rank, 2, torch.device("cpu"), examples[rank], examples[rank + 1])
        self._schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: loss_of(output))

    def forward_backward(self, batch: Tensor, scale: Callable[[Tensor], Tensor]) -> float:
        """Run the pipeline. Return the loss on every rank, although only the last one computes it."""
        losses: list[Tensor] = []
        if dist.get_rank() == 0:
            self._schedule.step(batch)
        else:
            self._schedule.step(target=torch.zeros(len(batch), 2), losses=losses)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(loss, 1)
        return float(loss)


@dataclass(frozen=True)
class Wrapper:
    """How a model is wrapped. Its checkpoints are also loaded under the wrappers `others`."""

    world_size: int
    wrap: Callable[[Subject], Wrapped]
    others: tuple[str, ...]
    width: int = EVEN


def _compiled(model: Subject) -> Wrapped:
    return Wrapped(torch.compile(model, backend="aot_eager"))  # type: ignore[arg-type]  # an OptimizedModule


def _compiled_in_place(model: Subject) -> Wrapped:
    model.compile(backend="aot_eager")
    return Wrapped(model)


def _recomputed(model: Subject) -> Wrapped:
    model.middle = checkpoint_wrapper(model.middle)
    return Wrapped(model)


def _fsdp1(model: Subject) -> Wrapped:
    return Wrapped(FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu")))


def _mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return a mesh of all ranks, whose groups end with the case."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _fsdp1_with_mesh(model: Subject) -> Wrapped:
    mesh = _mesh((dist.get_world_size(),))
    return Wrapped(
        FullyShardedDataParallel(model, use_orig_params=True, device_mesh=mesh, device_id=torch.device("cpu"))
    )


def _fsdp2(model: Subject) -> Wrapped:
    mesh = _mesh((dist.get_world_size(),))
    fully_shard(model.middle, mesh=mesh)  # type: ignore[arg-type]  # not None before a pipeline is cut
    fully_shard(model, mesh=mesh)
    return Wrapped(model)


def _hsdp(model: Subject) -> Wrapped:
    fully_shard(model, mesh=_mesh((2, 2), ("replicate", "shard")))
    return Wrapped(model)


def _tensor_parallel_fsdp2(model: Subject) -> Wrapped:
    mesh = _mesh((2, 2), ("dp", "tp"))
    plan = {
        "up": ColwiseParallel(output_layouts=Replicate()),
        "down": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    return Wrapped(model)


PLAIN, FSDP2, TP = "plain", "FSDP2", "TP x FSDP2"
WRAPPERS: dict[str, Wrapper] = {
    PLAIN: Wrapper(1, Wrapped, (FSDP2,)),
    "torch.compile": Wrapper(1, _compiled, (FSDP2,)),
    "module.compile": Wrapper(1, _compiled_in_place, (FSDP2,)),
    "activation checkpointing": Wrapper(1, _recomputed, (FSDP2,)),
    "DDP": Wrapper(2, lambda model: Wrapped(DistributedDataParallel(model, find_unused_parameters=True)), (PLAIN,)),
    "FSDP1": Wrapper(2, _fsdp1, (PLAIN,)),
    "FSDP1 with a mesh": Wrapper(2, _fsdp1_with_mesh, (PLAIN,)),
    FSDP2: Wrapper(2, _fsdp2, (PLAIN, TP)),
    "PP": Wrapper(2, Stage, (PLAIN,)),
    "HSDP": Wrapper(4, _hsdp, (FSDP2,)),
    TP: Wrapper(4, _tensor_parallel_fsdp2, (FSDP2,)),
    "TP x FSDP2, uneven": Wrapper(4, _tensor_parallel_fsdp2, (FSDP2,), UNEVEN),
}
