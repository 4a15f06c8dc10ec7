"""What people do with several ranks: wrappers, replicas by hand, averages now and then, gradients over several steps.

Each trick is one rank's objects and its step. `batch` is another one on each rank, so what no wrapper averages differs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

WIDTH = 8
Step = Callable[[], None]


def mesh(*shape: int) -> DeviceMesh:
    """Return a mesh of all ranks, whose groups end with the case."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def average(tensors: Iterable[Tensor]) -> None:
    """Average `tensors` over all ranks, in place. **Collective**."""
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())


class Trick:
    """Plain layers without any wrapper, trained by AdamW: a forgotten DDP."""

    options: ClassVar[dict[str, Any]] = {}
    """Arguments of `CheckpointManager.for_loop`."""
    states: dict[str, Any] | None = None
    gets_lowest = False
    """Whether every rank gets the lowest rank's state, as the options say."""

    def __init__(self, rank: int, seed: int) -> None:
        self.rank = rank
        self.module: nn.Module = self.build(seed)
        self.optimizers: list[Optimizer] = [self.optimizer()]

    def build(self, seed: int) -> nn.Module:
        return layers(seed)

    def optimizer(self) -> Optimizer:
        return torch.optim.AdamW(self.module.parameters(), lr=0.05)

    def batch(self, number: int) -> Tensor:
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * number + self.rank))

    def loss(self, number: int) -> Tensor:
        loss: Tensor = (self.module(self.batch(number)) - 1).square().mean()
        return loss

    def step(self, number: int, wait: Step) -> float:
        """Train on batch `number`, and call `wait` before the state changes. Return the loss."""
        for each in self.optimizers:
            each.zero_grad()
        loss = self.loss(number)
        loss.backward()
        self.reduce()
        wait()
        for each in self.optimizers:
            each.step()
        self.after(number)
        return float(loss.detach())

    def warm_up(self) -> None:
        """Do what the first step of a process does otherwise than later ones, and change no state."""

    def contents(self) -> dict[str, Any]:
        """Return what a resume must restore on this rank."""
        return {
            "model": {name: value.detach() for name, value in self.module.state_dict().items()},
            "optimizers": [
                [dict(each.state.get(parameter, {})) for group in each.param_groups for parameter in group["params"]]
                for each in self.optimizers
            ],
            "states": {name: state.state_dict() for name, state in (self.states or {}).items()},
        }

    def reduce(self) -> None:
        """Reduce gradients by hand, before the optimizer's step."""

    def after(self, number: int) -> None:
        """Do what follows the optimizer's step."""


class Ddp(Trick):
    def build(self, seed: int) -> nn.Module:
        return DistributedDataParallel(layers(seed))

    def warm_up(self) -> None:
        """Let DDP reduce once: it orders its buckets after the first time, and then sums in another order."""
        self.loss(0).backward()
        self.optimizers[0].zero_grad()


class DdpByHand(Trick):
    def reduce(self) -> None:
        average(each.grad for each in self.module.parameters() if each.grad is not None)


class MayDiffer(Trick):
    options: ClassVar[dict[str, Any]] = {"ranks_may_differ": True}
    gets_lowest = True


class Fsdp(Trick):
    def build(self, seed: int) -> nn.Module:
        return fully_shard(layers(seed), mesh=mesh(dist.get_world_size()))


class Ignored(Trick):
    """`ignored_params` of `fully_shard`, whose gradients nothing reduces."""

    def build(self, seed: int) -> nn.Module:
        model = layers(seed)
        self.ignored = set(model[0].parameters())
        return fully_shard(model, mesh=mesh(dist.get_world_size()), ignored_params=self.ignored)


class IgnoredAveraged(Ignored):
    def reduce(self) -> None:
        # In one order on all ranks: a set has another one on each.
        average(each.grad for each in self.module.parameters() if each in self.ignored and each.grad is not None)


class Hsdp(Trick):
    def build(self, seed: int) -> nn.Module:
        return fully_shard(layers(seed), mesh=mesh(2, dist.get_world_size() // 2))


class HsdpApart(Hsdp):
    """The second replica group drifts."""

    def after(self, number: int) -> None:
        if self.rank >= dist.get_world_size() // 2:
            with torch.no_grad():
                self.module[0].weight.to_local().add_(0.1)  # type: ignore[index, operator]


class Experts(Trick):
    """A shared layer, averaged by hand, and an expert of each rank."""

    def build(self, seed: int) -> nn.Module:
        return nn.ModuleDict({"shared": layers(seed), self.name(): layers(seed + 1 + self.rank)})

    def name(self) -> str:
        return "expert"

    def loss(self, number: int) -> Tensor:
        made: Tensor = self.module[self.name()](self.module["shared"](self.batch(number)))  # type: ignore[index]
        return (made - 1).square().mean()

    def reduce(self) -> None:
        average(each.grad for each in self.module["shared"].parameters())  # type: ignore[index, union-attr, misc]


class OwnExperts(Experts):
    def name(self) -> str:
        return f"expert{self.rank}"


class Stages(Trick):
    """A pipeline by hand: each rank has a stage, here trained on batches of its own."""

    def build(self, seed: int) -> nn.Module:
        return layers(seed + self.rank)


class StagesOfOtherShapes(Stages):
    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 2 + self.rank), nn.Linear(2 + self.rank, WIDTH))


class OwnStages(StagesOfOtherShapes):
    def build(self, seed: int) -> nn.Module:
        return nn.ModuleDict({f"stage{self.rank}": super().build(seed)})

    def loss(self, number: int) -> Tensor:
        made: Tensor = self.module[f"stage{self.rank}"](self.batch(number))  # type: ignore[index]
        return (made - 1).square().mean()


class LocalSgd(Trick):
    """Averages of parameters every three steps; the save is at step 3."""

    every, momentum = 3, 0.0

    def optimizer(self) -> Optimizer:
        return torch.optim.SGD(self.module.parameters(), lr=0.5, momentum=self.momentum)

    def after(self, number: int) -> None:
        if number % self.every == 0:
            average(each.detach() for each in self.module.parameters())


class LocalSgdBetween(LocalSgd):
    every = 2


class LocalSgdMomentum(LocalSgd):
    momentum = 0.9


class PostLocalSgd(Trick):
    period, skipped = 3, 2  # It averages after steps 3 and 6.

    def optimizer(self) -> Optimizer:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The package scripts functions, which torch deprecates.
            from torch.distributed.optim import PostLocalSGDOptimizer
        inner = torch.optim.SGD(self.module.parameters(), lr=0.5)
        return PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=self.period, warmup_steps=self.skipped))


class PostLocalSgdBetween(PostLocalSgd):
    period, skipped = 4, 0


class DiLoCo(Trick):
    """An outer copy that is trained on the averaged progress of inner copies, every three steps."""

    inner_name = "inner"

    def build(self, seed: int) -> nn.Module:
        return nn.ModuleDict({"outer": layers(seed), self.inner_name: layers(seed)})

    def optimizer(self) -> Optimizer:
        return torch.optim.AdamW(self.inner.parameters(), lr=0.05)

    def __init__(self, rank: int, seed: int) -> None:
        self.inner_name = self.inner_name.format(rank=rank)
        super().__init__(rank, seed)
        self.outer = torch.optim.SGD(self.module["outer"].parameters(), lr=0.7, momentum=0.9, nesterov=True)  # type: ignore[index, union-attr]
        self.optimizers.append(self.outer)

    @property
    def inner(self) -> nn.Module:
        found: nn.Module = self.module[self.inner_name]  # type: ignore[index]
        return found

    def step(self, number: int, wait: Step) -> float:
        self.optimizers[0].zero_grad()
        loss = (self.inner(self.batch(number)) - 1).square().mean()
        loss.backward()
        wait()
        self.optimizers[0].step()
        if number % 3 == 0:
            pairs = [*zip(self.module["outer"].parameters(), self.inner.parameters(), strict=True)]  # type: ignore[index, union-attr]
            for outer, inner in pairs:
                outer.grad = outer.detach() - inner.detach()
            average(outer.grad for outer, _ in pairs if outer.grad is not None)
            self.outer.step()
            self.outer.zero_grad()
            for outer, inner in pairs:
                inner.detach().copy_(outer.detach())
        return float(loss.detach())


class OwnDiLoCo(DiLoCo):
    inner_name = "inner{rank}"


class LossOutsideDdp(Trick):
    """A loss with parameters, which the wrapper of the model does not cover."""

    def build(self, seed: int) -> nn.Module:
        return nn.ModuleDict({"model": DistributedDataParallel(layers(seed)), "loss": nn.Linear(WIDTH, 1)})

    def loss(self, number: int) -> Tensor:
        made: Tensor = self.module["loss"](self.module["model"](self.batch(number)))  # type: ignore[index]
        return (made - 1).square().mean()


class LastBits(DdpByHand):
    """What reductions in no fixed order leave."""

    def after(self, number: int) -> None:
        with torch.no_grad():
            self.module[0].weight.mul_(1 + 1e-6 * self.rank)  # type: ignore[index, operator]


class RunningStatistics(Trick):
    def build(self, seed: int) -> nn.Module:
        return DistributedDataParallel(nn.Sequential(layers(seed), nn.BatchNorm1d(WIDTH)))


class Accumulated(Ddp):
    """Gradients of two batches for each step of the optimizer, and a save counted in batches."""

    def step(self, number: int, wait: Step) -> float:
        is_last = number % 2 == 0
        with nullcontext() if is_last else self.whole():
            loss = self.loss(number)
            (loss / 2).backward()
        if is_last:
            wait()
            self.optimizers[0].step()
            self.optimizers[0].zero_grad()
        return float(loss.detach())

    def whole(self) -> Any:
        return nullcontext()


class NoSync(Accumulated):
    def whole(self) -> Any:
        return self.module.no_sync()  # type: ignore[operator]


class AtTheBoundary(Ddp):
    """The same gradients, and a save counted in steps of the optimizer."""

    def step(self, number: int, wait: Step) -> float:
        for half in (0, 1):
            with nullcontext() if half else self.module.no_sync():  # type: ignore[operator]
                loss = self.loss(2 * number + half)
                (loss / 2).backward()
        wait()
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()
        return float(loss.detach())


class ZeroedInPlace(Ddp):
    def step(self, number: int, wait: Step) -> float:
        self.optimizers[0].zero_grad(set_to_none=False)
        loss = self.loss(number)
        loss.backward()
        wait()
        self.optimizers[0].step()
        return float(loss.detach())


class Clipped(Ddp):
    def reduce(self) -> None:
        nn.utils.clip_grad_norm_(self.module.parameters(), 0.1)


class Scaled(Ddp):
    """A scaler that skips the step before the save, whose gradients overflowed."""

    def __init__(self, rank: int, seed: int) -> None:
        super().__init__(rank, seed)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        self.states = {"scaler": self.scaler}

    def step(self, number: int, wait: Step) -> float:
        self.optimizers[0].zero_grad()
        loss = self.loss(number)
        self.scaler.scale(loss).backward()
        if number == 3:
            next(iter(self.module.parameters())).grad.fill_(float("inf"))  # type: ignore[union-attr]
        wait()
        self.scaler.step(self.optimizers[0])
        self.scaler.update()
        return float(loss.detach())


class Gan(Trick):
    """The generator's loss leaves gradients in the discriminator, which its own step zeroes before use."""

    def __init__(self, rank: int, seed: int) -> None:
        super().__init__(rank, seed)
        self.optimizers = [
            torch.optim.AdamW(self.module[name].parameters(), lr=0.05)  # type: ignore[index, union-attr]
            for name in ("generator", "discriminator")
        ]

    def optimizer(self) -> Optimizer:
        return torch.optim.AdamW(self.module.parameters())

    def build(self, seed: int) -> nn.Module:
        return nn.ModuleDict({name: layers(seed + at) for at, name in enumerate(("generator", "discriminator"))})

    def step(self, number: int, wait: Step) -> float:
        generator, discriminator = (self.module[name] for name in ("generator", "discriminator"))  # type: ignore[index]
        noise = self.batch(number)
        wait()
        self.optimizers[1].zero_grad()
        made, real = discriminator(generator(noise).detach()), discriminator(noise)
        (made.square().mean() + (real - 1).square().mean()).backward()
        average(each.grad for each in discriminator.parameters())  # type: ignore[misc]
        self.optimizers[1].step()
        self.optimizers[0].zero_grad()
        loss: Tensor = (discriminator(generator(noise)) - 1).square().mean()
        loss.backward()
        average(each.grad for each in generator.parameters())  # type: ignore[misc]
        self.optimizers[0].step()
        return float(loss.detach())


TRICKS: dict[str, type[Trick]] = {
    "DDP": Ddp,
    "gradients averaged by hand": DdpByHand,
    "FSDP2": Fsdp,
    "FSDP2, `ignored_params`": Ignored,
    "FSDP2, `ignored_params` averaged by hand": IgnoredAveraged,
    "HSDP": Hsdp,
    "HSDP, a replica that drifts": HsdpApart,
    "a forgotten DDP": Trick,
    "a forgotten DDP, `ranks_may_differ=True`": MayDiffer,
    "a loss with parameters, outside DDP": LossOutsideDdp,
    "last bits that differ": LastBits,
    "BatchNorm under DDP": RunningStatistics,
    "experts under one name": Experts,
    "experts under names of their own": OwnExperts,
    "pipeline by hand, equal names": Stages,
    "pipeline by hand, equal names, other shapes": StagesOfOtherShapes,
    "pipeline by hand, names of its own": OwnStages,
    "local SGD, saved on an average": LocalSgd,
    "local SGD, saved between two averages": LocalSgdBetween,
    "local SGD with momentum, saved on an average": LocalSgdMomentum,
    "PostLocalSGDOptimizer, saved on an average": PostLocalSgd,
    "PostLocalSGDOptimizer, saved between two averages": PostLocalSgdBetween,
    "DiLoCo": DiLoCo,
    "DiLoCo, inner copies under names of their own": OwnDiLoCo,
    "accumulated gradients, saved between two batches of a step": Accumulated,
    "`no_sync`, saved between two batches of a step": NoSync,
    "accumulated gradients, saved after the step": AtTheBoundary,
    "`zero_grad(set_to_none=False)` at the start of a step": ZeroedInPlace,
    "`clip_grad_norm_`": Clipped,
    "a scaler that skips the step of the save": Scaled,
    "GAN with gradients of the other loss": Gan,
}
"""By name, as a reader looks for it. HSDP needs four ranks."""
