"""What ranks may hold apart: states of owners, differences that come late, settings, lists, copies of shards.

Each is tried under DDP and under FSDP2, where what has no parameter's sharding is plain on each rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.held import Held
from tests.zoo.tricks import Ddp, Fsdp, Trick, mesh
from torchtitan_lite.checkpoint.state.per_rank import PerRank

POSITIONS = 200
"""Tensors of which one differs late."""


def last_rank() -> int:
    return dist.get_world_size() - 1


class OfOwners(Optimizer):
    """Keeps a momentum, and under FSDP2 a norm, of parameter i on rank i modulo the number of ranks."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without a closure
        for at, parameter in enumerate(self.param_groups[0]["params"]):
            is_owner = at % dist.get_world_size() == dist.get_rank()
            if hasattr(parameter, "to_local"):
                norm = parameter.grad.norm().full_tensor()
                if is_owner:
                    self.state[parameter].setdefault("norm", torch.zeros(())).lerp_(norm, 0.1)
                parameter.sub_(parameter.grad, alpha=0.1)
                continue
            if is_owner:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                parameter.sub_(momentum.lerp_(parameter.grad, 0.1))
            dist.broadcast(parameter.detach(), at % dist.get_world_size())


class Owners(Trick):
    def optimizer(self) -> Optimizer:
        return OfOwners(self.module.parameters(), {"lr": 1.0})


class OwnParameters(Trick):
    """An optimizer of the parameters that the rank owns, which sends the others the result."""

    def optimizer(self) -> Optimizer:
        return torch.optim.AdamW([*self.module.parameters()][self.rank :: dist.get_world_size()], lr=0.05)

    def warm_up(self) -> None:
        super().warm_up()
        self.module.zero_grad()

    def after(self, number: int) -> None:
        for at, parameter in enumerate(self.module.parameters()):
            dist.broadcast(parameter.detach(), at % dist.get_world_size())
        self.module.zero_grad()


class Counted(Optimizer):
    """Keeps a plain count of each parameter, which trains nothing."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without a closure
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("count", torch.zeros(())).add_(1)


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.randn(2, 2) for _ in range(POSITIONS))

    def forward(self, _: Tensor) -> Tensor:
        return torch.stack([*self.tensors]).sum()


class Late(Trick):
    """Many tensors, of which one differs on the last rank after the first save."""

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return DistributedDataParallel(Many())

    def optimizer(self) -> Optimizer:
        return torch.optim.SGD(self.module.parameters(), lr=1e-4)

    def at(self, position: int) -> Tensor:
        """Return the tensor at `position`."""
        return [*self.module.parameters()][position].detach()


class LateCount(Late):
    """Of many sharded tensors one has another count: only that is plain, so only that can differ."""

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return fully_shard(Many(), mesh=mesh(dist.get_world_size()))

    def optimizer(self) -> Optimizer:
        return Counted(self.module.parameters(), {})

    def at(self, position: int) -> Tensor:
        count: Tensor = self.optimizers[0].state[[*self.module.parameters()][position]]["count"]
        return count


class More(Trick):
    """A setting more on the first rank, or on the last one."""

    on_first = True

    def optimizer(self) -> Optimizer:
        has_more = self.rank == (0 if self.on_first else last_rank())
        return torch.optim.AdamW([{"params": self.module.parameters()} | ({"more": 1} if has_more else {})], lr=0.05)


class MoreOnLast(More):
    on_first = False


class MoreAndLr(MoreOnLast):
    """And a learning rate that differs, which DDP does not see before the first step."""

    def after(self, number: int) -> None:
        self.optimizers[0].param_groups[0]["lr"] = 0.05 + self.rank


class ListInSetting(Trick):
    """A list of tensors that is longer on higher ranks."""

    def optimizer(self) -> Optimizer:
        scales = [torch.tensor(10.0 * self.rank + at) for at in range(1 + self.rank)]
        return torch.optim.AdamW([{"params": self.module.parameters(), "scales": scales}], lr=0.05)


class ShorterList(Trick):
    def optimizer(self) -> Optimizer:
        scales = [torch.tensor(10.0 * self.rank + at) for at in range(dist.get_world_size() - self.rank)]
        return torch.optim.AdamW([{"params": self.module.parameters(), "scales": scales}], lr=0.05)


class ListInState(Trick):
    def __init__(self, rank: int, seed: int) -> None:
        super().__init__(rank, seed)
        self.states = {"held": Held(seen=[torch.tensor(10.0 * rank + at) for at in range(1 + rank)])}


class NoListInState(ListInState):
    """An empty list, which is a value and no container, on the first rank alone."""

    def __init__(self, rank: int, seed: int) -> None:
        super().__init__(rank, seed)
        self.states = {"held": Held(seen=[torch.tensor(1.0)] * rank)}


class ListOfParameter(Trick):
    """A list in the state of each parameter."""

    def after(self, number: int) -> None:
        for state in self.optimizers[0].state.values():
            state["seen"] = [torch.tensor(float(at)) for at in range(1 + self.rank)]


class Average(Trick):
    """An average of this rank's shards, made by hand."""

    def __init__(self, rank: int, seed: int) -> None:
        super().__init__(rank, seed)
        shards = {name: self.shard(each).clone() for name, each in self.module.named_parameters()}
        self.average = Held(**shards)
        self.states = {"average": self.wrapped()}

    def shard(self, parameter: Tensor) -> Tensor:
        return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach()

    def wrapped(self) -> Any:
        return self.average

    def after(self, number: int) -> None:
        for name, each in self.module.named_parameters():
            self.average.values[name].lerp_(self.shard(each), 0.1)


class AveragePerRank(Average):
    def wrapped(self) -> Any:
        return PerRank(self.average)


_UNDER: dict[str, type[Trick]] = {"DDP": Ddp, "FSDP2": Fsdp}
_BOTH: dict[str, type[Trick]] = {
    "states that only their owners have": Owners,
    "a setting more on the first rank": More,
    "a setting more on the last rank": MoreOnLast,
    "a setting more on the last rank and another learning rate": MoreAndLr,
    "a list in a setting, longer on higher ranks": ListInSetting,
    "a list in a setting, shorter on higher ranks": ShorterList,
    "a list in a state, longer on higher ranks": ListInState,
    "a list in a state, empty on the first rank": NoListInState,
    "a list in the state of a parameter, longer on higher ranks": ListOfParameter,
    "an average made by hand of what the rank holds": Average,
    "an average made by hand, in `PerRank`": AveragePerRank,
}
LATE: dict[str, type[Late]] = {
    "one of 200 tensors differs after the first save, DDP": Late,
    "the count of one of 200 tensors differs after the first save, FSDP2": LateCount,
}
APART: dict[str, type[Trick]] = {
    "owners with an optimizer of their parameters, DDP": type("OwnParametersDdp", (OwnParameters, Ddp), {}),
} | {
    f"{name}, {under}": type(f"{trick.__name__}{under}", (trick, base), {})
    for name, trick in _BOTH.items()
    for under, base in _UNDER.items()
}
"""By name."""
