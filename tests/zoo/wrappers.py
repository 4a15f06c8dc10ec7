"""The wrappers of models, each with the number of processes that it runs on here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

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

from tests.zoo.models import BATCH, INPUT, OUTPUT, Subject

EVEN, UNEVEN = 8, 7
Loss = Callable[[Tensor], Tensor]


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


@cache
def _mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return the only mesh of this process: the groups of a mesh have threads that never end."""
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
