"""An optimizer's state by parameter name, and the flat keys under which it is saved.

Keys are `state.<fqn>.<name>` and `param_groups.<fqn>.<key>`: by FQN and not by index, so that a
parameter finds its state whatever part, rank or group it belongs to. Names that are not strings, or have
dots, are in a dict under `state.<fqn>`. What belongs to no parameter is under `optimizers.<number of the
optimizer>`, and `layouts.<fqn>.<name>` holds how a tensor was sharded if not like its parameter, or the order of its
dimensions in memory if a load would not make the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchtitan_lite.checkpoint.format.flattening import named_tensors
from torchtitan_lite.checkpoint.format.shards import PLAIN_TENSORS, local_of
from torchtitan_lite.checkpoint.format.structure import FORM, are_pieces
from torchtitan_lite.checkpoint.state.subclasses import is_made_of_others
from torchtitan_lite.errors import CheckpointMismatch, ConfigError

STATE, SETTINGS, LAYOUTS, OF_OPTIMIZERS = "state", "param_groups", "layouts", "optimizers"
PARAMETERS = "_parameters"
"""In a state that belongs to an optimizer as a whole, the key below which each of its parameters has an entry."""


@dataclass(frozen=True)
class Group:
    """A parameter group: the names of its parameters, and its settings."""

    names: Sequence[str]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class OptimizerState:
    """The content of an optimizer's state dict, by name. A parameter that never stepped is not in `states`."""

    states: Mapping[str, Mapping[Any, Any]]
    groups: Sequence[Group]
    rest: Mapping[str, Any] = field(default_factory=dict)
    """What belongs to no parameter; empty for most."""


@dataclass(frozen=True)
class ParameterSlot:
    """A parameter that an optimizer holds, as a load sees it."""

    names: Sequence[str]
    """Its FQNs, more than one if it is tied; it is saved under the first."""
    group: tuple[int, int]
    """Numbers of its optimizer and group."""
    like: torch.Tensor
    """A tensor with the shape, device and sharding of state that has the parameter's shape."""
    settings: Mapping[str, Any]
    state: Mapping[Any, Any]
    """The live state that may be read into; empty if there is none."""
    first: Mapping[Any, Any] = field(default_factory=dict)
    """What a first step would make, where that was needed: it may be read into, and is no state yet."""
    owner: int | None = None
    """The rank that alone has the state, where a `StateOwner` says so."""

    def empty(
        self, name: Any, shape: torch.Size, dtype: torch.dtype, live: Any, layout: str = "", path: Path = ()
    ) -> torch.Tensor:
        """Return memory for the stored tensor at `path` in `name` of the state, laid out as `layout` says.

        It is `live` if shape and dtype fit, else a new tensor.
        """
        if isinstance(live, torch.Tensor) and (live.shape, live.dtype) == (shape, dtype) and not live.requires_grad:
            return live
        device = self.like.device
        if layout.startswith(ORDERS):
            if order := order_of(layout, path, len(shape)):
                return torch.empty_permuted(shape, order, dtype=dtype, device=device)
        elif layout and isinstance(self.like, DTensor):
            return _empty_sharded(shape, dtype, self.like, layout)
        if self.like.shape == shape and name != "step" and not is_made_of_others(self.like):
            return torch.empty_like(self.like, dtype=dtype, requires_grad=False)
        # As in torch: step counters are on the CPU, unless the optimizer is capturable or fused.
        if name == "step" and not (self.settings.get("capturable") or self.settings.get("fused")):
            device = torch.device("cpu")
        return torch.empty(shape, dtype=dtype, device=device)


def flat_optimizer_state(state: OptimizerState) -> Iterator[tuple[str, Any]]:
    """Yield the flat keys and values of `state`, except of `state.rest`."""
    for name, own in state.states.items():
        odd = {}
        for key, value in own.items():
            if isinstance(key, str) and "." not in key:
                yield f"{STATE}.{name}.{key}", value
            else:
                odd[key] = value
        if odd:
            yield f"{STATE}.{name}", odd
    for group in state.groups:
        for name in group.names:
            for key, value in group.settings.items():
                yield f"{SETTINGS}.{name}.{key}", value


def flat_layouts(state: OptimizerState, like: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Yield how tensors are laid out that are neither like their parameter, which `like` has by name, nor row-major.

    Raises TypeError for a plain tensor that may differ between ranks, because nothing says where its part belongs, and
    ConfigError for tensors of sharded parameters within lists or dicts: a load could make only plain tensors of
    DTensors there, as of those in settings, and refuses all others, as `refuse_unsharded` does.
    """
    for name, own in state.states.items():
        is_plain = type(like[name]) in PLAIN_TENSORS and like[name].is_contiguous()
        for key, value in own.items():
            if is_plain and type(value) is torch.Tensor and value.layout is torch.strided and value.is_contiguous():
                # Almost all tensors: the rest would take a millisecond for every 100 of them, at each save.
                continue
            where = f"optimizer.{STATE}.{name}.{key}"
            for tensor in nested_tensors(value) if not are_pieces(value) else ():
                _refuse_local(where, tensor, like[name])
                if tensor is value or FORM in value:
                    continue
                if isinstance(tensor, DTensor) or (isinstance(like[name], DTensor) and tensor.numel() > 1):
                    found, lost = "tensors", "refuse: nothing says how to shard them"
                    if isinstance(tensor, DTensor):
                        found, lost = "DTensors", "turn into plain tensors"
                    raise ConfigError(
                        f"{where} is a {type(value).__name__} with {found} in it, which a load would {lost}. Use an "
                        "optimizer whose state holds tensors directly, unlike LBFGS, or train without fully_shard."
                    )
            if isinstance(value, DTensor) and value.shape != like[name].shape:
                words = [f"shard{each.dim}" if isinstance(each, Shard) else "replicate" for each in value.placements]
                yield f"{LAYOUTS}.{name}.{key}", ",".join(words)
            elif orders := orders_in(value, like[name]):
                yield f"{LAYOUTS}.{name}.{key}", orders
    for group in state.groups:
        for key, value in group.settings.items():
            if any(isinstance(tensor, DTensor) and tensor.numel() > 1 for tensor in nested_tensors(value)):
                where = ".".join([f"optimizer.{SETTINGS}", *group.names[:1], key])
                raise ConfigError(
                    f"{where} has DTensors, which a load would turn into plain tensors. Keep them in the state of "
                    "their parameters, or train without fully_shard."
                )


def refuse_unsharded(states: Mapping[str, Mapping[Any, Any]], like: Mapping[str, torch.Tensor]) -> None:
    """Raise `CheckpointMismatch` for stored tensors in lists or dicts whose parameter is sharded now."""
    for name, own in states.items():
        for key, value in own.items() if isinstance(like.get(name), DTensor) else ():
            if isinstance(value, torch.Tensor) or (isinstance(value, Mapping) and FORM in value):
                continue
            if all(each.numel() <= 1 for each in nested_tensors(value)):
                continue
            raise CheckpointMismatch(
                "the optimizer's state dict",
                f"  {STATE}.{name}.{key} is a {type(value).__name__} with tensors in it, and nothing says how to shard "
                "them. Resume without fully_shard, or begin the optimizer's state from scratch with "
                "--checkpoint.exclude_from_loading=optimizer.",
            )


def by_name(flat_state: Mapping[str, Any], names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states and the settings in `flat_state`, each by the parameter's name (one of `names`) and key."""
    states: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for key, value in flat_state.items():
        kind, _, rest = key.partition(".")
        if kind == STATE and rest in names:
            states.setdefault(rest, {}).update(value)
        elif kind in (STATE, SETTINGS):
            name, own_key = split_state_key(rest, names)
            (states if kind == STATE else settings).setdefault(name, {})[own_key] = value
    return states, settings


def split_state_key(rest: str, names: Collection[str]) -> tuple[str, str]:
    """Return the parameter's name and the key in `<name>.<key>`; the name is one of `names` if one fits."""
    name, _, key = rest.rpartition(".")
    at = len(name)
    while at > 0 and rest[:at] not in names:
        at = rest.rfind(".", 0, at)
    return (rest[:at], rest[at + 1 :]) if at > 0 else (name, key)


def nested_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            if isinstance(inner, torch.Tensor):
                yield inner
            else:
                yield from nested_tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from nested_tensors(inner)


def _refuse_local(where: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        if any(isinstance(placement, Partial) for placement in tensor.placements):
            raise TypeError(f"{where} is a DTensor of partial sums: no rank has its values. Redistribute it first.")
        return
    if not isinstance(like, DTensor) or tensor.numel() <= 1 or like.device_mesh.size() == 1:
        return
    own, whole = local_of(like).shape, like.shape
    cut = {size for size, of_whole in zip(own, whole, strict=True) if size != of_whole}
    # Any size that only this rank's part has is one that the optimizer took from it, as of statistics of its rows.
    if any(p.is_shard() for p in like.placements) and (tensor.shape in (own, whole) or cut & {*tensor.shape}):
        raise TypeError(
            f"{where} is a plain tensor of shape {list(tensor.shape)} while its parameter is sharded, so it differs "
            "between ranks and nothing says which part of the whole it is. Make it with torch.zeros_like(parameter)."
        )


def _empty_sharded(shape: torch.Size, dtype: torch.dtype, like: DTensor, layout: str) -> DTensor:
    mesh, spelt = like.device_mesh, layout.split(",")
    # On a mesh with another number of dimensions each rank holds the whole tensor; the optimizer may shard it.
    placements: list[Placement] = [Replicate() for _ in range(mesh.ndim)]
    sharded = {f"shard{dim}": Shard(dim) for dim in range(len(shape))}
    if len(spelt) == mesh.ndim:
        placements = [sharded.get(word, Replicate()) for word in spelt]
    return torch.distributed.tensor.empty(shape, dtype=dtype, device_mesh=mesh, placements=placements)


# Optimizer states that only some of the ranks with their parameter keep, as the momenta of distributed Muons.
#
# A plan finds them by their absence on the other ranks, and a checkpoint has, under `owners.<fqn>.<key>`, which ranks
# of how many had the state. As many ranks load it as they had it, and one rank loads all; for another number of ranks,
# only the user's `StateOwner` can say which of them has it now.


StateOwner = Callable[[str, int], int | None]
"""From the name of a parameter and the number of ranks to the rank that alone has its state; None: each rank has it."""
OWNERS = "owners"
OWNER_KEYS = f"optimizer.{OWNERS}."


@dataclass(frozen=True)
class OwnerRanks:
    """The `ranks`, of `num_ranks`, that had a state when it was saved."""

    ranks: tuple[int, ...]
    num_ranks: int
    sharding: str = ""
    """How the parameter was sharded, if each of the ranks had a shard of the state; empty if it had all."""

    def __str__(self) -> str:
        return f"{','.join(map(str, self.ranks))} of {self.num_ranks}" + (self.sharding and f" as {self.sharding}")

    @classmethod
    def parse(cls, text: object) -> OwnerRanks:
        """Return what `text` of a checkpoint says; no ranks of none for anything else."""
        whole, _, sharding = str(text).partition(" as ")
        ranks, _, num_ranks = whole.partition(" of ")
        numbers = [*ranks.split(","), num_ranks]
        if not all(number.isascii() and number.isdecimal() for number in numbers):
            return cls((), 0)
        return cls(tuple(map(int, numbers[:-1])), int(num_ranks), sharding)

    def include(self, rank: int, num_ranks: int, owner: int | None, sharding: str) -> bool | None:
        """Return whether `rank` of `num_ranks` has the state now; None if that is not known.

        `owner` as `StateOwner` gives it; `sharding` is that of the parameter now.
        """
        if num_ranks == self.num_ranks:
            return rank in self.ranks if self.sharding in ("", sharding) else None
        if num_ranks == 1:
            return True
        return None if owner is None or self.sharding else rank == owner


def owner_of(state_owner: StateOwner | None, name: str, num_ranks: int) -> int | None:
    """Return the rank that alone has the state of the parameter `name`. Raises ConfigError for anything but a rank."""
    owner = state_owner(name, num_ranks) if state_owner is not None else None
    if owner is not None and (type(owner) is not int or not 0 <= owner < num_ranks):
        raise ConfigError(
            f"state_owner({name!r}, {num_ranks}) returned {owner!r}. Expected the number of a rank, below {num_ranks}, "
            "or None where each rank keeps the state."
        )
    return owner


# The order in which the dimensions of an optimizer's tensors lie in memory.
#
# Kernels of linear algebra sum in another order if a matrix lies column by column, as `eigh` and `qr` return it, so
# preconditioners that came back row by row would change the last bits of every later step. A tensor that a load would
# make in another order has its own in the checkpoint: `order:` and for each such tensor its path, `=` and its
# dimensions, the outermost first, as in `order:0=1,0;2=1,0` for a list with two matrices of this kind.


ORDERS = "order:"
Path = tuple[str | int, ...]


def orders_in(value: Any, like: torch.Tensor) -> str:
    """Return the orders of the tensors in `value`, state of a parameter as `like`; empty if a load makes the same."""
    if isinstance(like, DTensor):
        return ""
    found = []
    for path, tensor, is_in_tuple in named_tensors(value):
        # A tuple is stored with the strides of its tensors.
        if is_in_tuple or isinstance(tensor, DTensor) or tensor.dim() < 2 or tensor.layout is not torch.strided:
            continue
        is_like = tensor.shape == like.shape
        if tensor.stride() == like.stride() if is_like else tensor.is_contiguous():
            continue
        if (order := _dim_order(tensor)) and not {*path} & {"=", ";"}:
            found.append(f"{path}={','.join(map(str, order))}")
    return ORDERS + ";".join(found) if found else ""


def order_of(orders: str, path: Path, dims: int) -> list[int]:
    """Return the order of the tensor at `path` in what `orders_in` returned; empty if it is row-major."""
    wanted = ".".join(map(str, path))
    for each in orders.removeprefix(ORDERS).split(";"):
        name, _, order = each.rpartition("=")
        numbers = order.split(",")
        if name == wanted and sorted(numbers) == [*map(str, range(dims))]:
            return [*map(int, numbers)]
    return []


def _dim_order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions of `tensor`, the outermost in memory first; empty if it has gaps or overlaps."""
    sizes, strides = tensor.shape, tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    step = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != step:
            return []
        step *= sizes[dim]
    return order
