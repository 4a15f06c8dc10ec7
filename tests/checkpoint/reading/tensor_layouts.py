"""Tensors of every dtype that DCP can save, in every memory layout."""

from __future__ import annotations

import torch
from torch import Tensor

from torchtitan_lite.checkpoint.format.torch_contents import DTYPES

NEGATABLE = ("float64", "float32", "float16", "bfloat16", "int8", "int64", "complex64", "complex32")


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Return a tensor of any bits, all kinds of NaN among them."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def bits(tensor: Tensor) -> bytes:
    """Return the row-major bytes of its elements."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""


def every_tensor() -> dict[str, Tensor]:
    """Return a tensor for each dtype and layout, named `dtype.layout`."""
    return {
        f"{name}.{layout}": tensor
        for seed, (name, dtype) in enumerate(DTYPES.items())
        for layout, tensor in _layouts(name, dtype, seed).items()
    }


def zeros(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return zeros, also of dtypes that `torch.zeros` does not support."""
    return torch.zeros(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(shape)


def zeros_like(tensor: Tensor) -> Tensor:
    """Return zeros in memory of their own, with the layout of `tensor`, or contiguous if its elements overlap."""
    plain = zeros(tensor.dtype, tuple(tensor.shape))
    if tensor.numel() and not _overlaps(tensor):
        room = zeros(tensor.dtype, (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)),))
        plain = room.as_strided(tensor.shape, tensor.stride())
    plain = plain.conj() if tensor.is_conj() else plain
    plain = torch._neg_view(plain) if tensor.is_neg() else plain
    return plain.requires_grad_(tensor.requires_grad)


def _overlaps(tensor: Tensor) -> bool:
    """Return whether two of its elements may share memory."""
    end = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride < end:
            return True
        end = stride * size
    return False


def _layouts(name: str, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    base = random_bits(dtype, (4, 6), seed)
    much = random_bits(dtype, (9, 8, 7), seed + 100)
    layouts = {
        "contiguous": base,
        "tied": base,
        "of_the_same_storage": base[1:3],
        "transposed": base.t(),
        "strided": much[::2, 1::3, 2:6],
        "permuted": much.permute(2, 0, 1)[1:],
        "expanded": random_bits(dtype, (5, 1), seed + 200).expand(5, 9),
        "overlapping": much.view(-1).as_strided((6, 5), (2, 1), 3),
        "scalar": random_bits(dtype, (), seed + 300),
        "scalar_of_more": much[3, 2, 1],
        "empty": torch.empty(0, dtype=dtype),
        "empty_box": much[:3, :0, :2],
        "of_ones": much[:1, 5:6, 2:3],
        "channels_last": random_bits(dtype, (2, 3, 4, 5), seed + 400).to(memory_format=torch.channels_last),
        # More than one block, with the end of a read request inside.
        "large": random_bits(dtype, (700, 300), seed + 500) if name in ("float32", "complex32") else base[:, 2],
        "large_transposed": random_bits(dtype, (700, 310), seed + 600).t() if name == "bfloat16" else base[:, 1:3].t(),
    }
    if dtype.is_floating_point or dtype.is_complex:
        layouts["requires_grad"] = base.clone().requires_grad_()
        layouts["parameter_transposed"] = torch.nn.Parameter(much[0].t())
    if dtype.is_complex:
        layouts["conjugate"] = base.conj()
        layouts["conjugate_transposed"] = base.mH
        layouts["conjugate_strided"] = much[::3, :, 1].conj()
    if name in NEGATABLE:
        layouts["negative"] = torch._neg_view(base)
        layouts["negative_strided"] = torch._neg_view(much[2, ::3])
    if name in ("complex64", "complex128"):
        layouts["imaginary_of_conjugate"] = base.conj().imag
    return layouts
