"""The order in which the dimensions of an optimizer's tensors lie in memory.

Kernels of linear algebra sum in another order if a matrix lies column by column, as `eigh` and `qr` return it, so
preconditioners that came back row by row would change the last bits of every later step. A tensor that a load would
make in another order has its own in the checkpoint: `order:` and for each such tensor its path, `=` and its dimensions,
the outermost first, as in `order:0=1,0;2=1,0` for a list with two matrices of this kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

ORDERS = "order:"
Path = tuple[str | int, ...]


def orders_in(value: Any, like: torch.Tensor) -> str:
    """Return the orders of the tensors in `value`, state of a parameter as `like`; empty if a load makes the same."""
    if isinstance(like, DTensor):
        return ""
    found = []
    for path, tensor in _tensors(value, ""):
        if tensor.dim() < 2 or tensor.layout is not torch.strided:
            continue
        is_like = tensor.shape == like.shape
        if tensor.stride() == like.stride() if is_like else tensor.is_contiguous():
            continue
        if (order := _order(tensor)) and not {*path} & {"=", ";"}:
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


def _tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors in nested dicts and lists, with their paths. Tuples are stored with their strides."""
    if isinstance(value, torch.Tensor):
        if not isinstance(value, DTensor):
            yield path, value
    elif isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            yield from _tensors(inner, f"{path}.{key}" if path else f"{key}")


def _order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions of `tensor`, the outermost in memory first; empty if it has gaps or overlaps."""
    sizes, strides = tensor.shape, tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    step = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != step:
            return []
        step *= sizes[dim]
    return order
