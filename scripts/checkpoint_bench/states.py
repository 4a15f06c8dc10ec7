"""The states to save: made by arithmetic, filled with noise, and compared bit by bit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtitan_lite.models.llama.args import ModelArgs
from torchtitan_lite.models.llama.model import Transformer

Shapes = dict[str, tuple[int, ...]]

SMALL_BYTES = 4096


@dataclass
class BenchState:
    """A model's tensors, the optimizer's under flat names, and a small object."""

    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=lambda: {"step": 7, "losses": [2.5, 2.25]})

    def nested(self) -> dict[str, Any]:
        """Return the state as a trainer passes it."""
        optimizer = {"optimizer": self.optimizer} if self.optimizer else {}
        return {"model": self.model, **optimizer, "train_state": dict(self.counters)}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of all tensors, under flat names."""
        both = {f"model.{name}": tensor for name, tensor in self.model.items()}
        both |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.items()}
        return {name: local(tensor) for name, tensor in both.items()}

    @property
    def num_bytes(self) -> int:
        """Return the bytes of this rank's elements."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def pieces(self) -> list[tuple[int, int]]:
        """Return (address, bytes) of each tensor's memory."""
        return [(each.data_ptr(), each.numel() * each.element_size()) for each in self.tensors().values()]

    def like(self) -> BenchState:
        """Return another state with the same tensors, all zeros, in touched memory."""
        return BenchState(_zeros(self.model), _zeros(self.optimizer), {"step": 0, "losses": []})

    def clear(self) -> None:
        """Set all tensors to zero, so that nothing of an earlier load is left."""
        for tensor in self.tensors().values():
            tensor.zero_()

    def assert_equals(self, other: BenchState, name: str) -> None:
        """Raise unless every tensor has the same bits in both states."""
        theirs = other.tensors()
        for key, tensor in self.tensors().items():
            if not torch.equal(_bits(tensor), _bits(theirs[key])):
                raise AssertionError(f"{name}: {key} was not loaded as it was saved")


def llama_args(num_params: int) -> ModelArgs:
    """Return the sizes of a llama of about `num_params` parameters."""
    wide = num_params >= 20_000_000
    base = ModelArgs(
        dim=1024 if wide else 128,
        n_heads=16 if wide else 4,
        n_kv_heads=8 if wide else 2,
        vocab_size=32_000 if num_params >= 100_000_000 else 4_000 if wide else 512,
        ffn_dim=2816 if wide else 352,
        max_seq_len=16,
        n_layers=1,
    )
    embeddings = 2 * base.vocab_size * base.dim
    a_layer = sum(torch.Size(shape).numel() for name, shape in shapes_of(base).items() if name.startswith("layers."))
    return dataclasses.replace(base, n_layers=max(1, round((num_params - embeddings) / a_layer)))


def shapes_of(args: ModelArgs) -> Shapes:
    """Return the parameters of a llama by name, without memory."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Transformer(args).named_parameters()}


def llama_state(num_params: int) -> BenchState:
    """Return a llama's fp32 parameters and the state of AdamW."""
    model, optimizer = {}, {}
    for name, shape in shapes_of(llama_args(num_params)).items():
        model[name] = torch.empty(shape)
        optimizer[f"state.{name}.step"] = torch.tensor(7.0)
        optimizer[f"state.{name}.exp_avg"] = torch.empty(shape)
        optimizer[f"state.{name}.exp_avg_sq"] = torch.empty(shape)
    return filled(BenchState(model, optimizer))


def small_state(num_tensors: int) -> BenchState:
    """Return a state of many tensors of 4 KiB."""
    model = {f"layers.{number}.w": torch.empty(SMALL_BYTES // 4) for number in range(num_tensors)}
    return filled(BenchState(model))


def make(workload: dict[str, Any]) -> BenchState:
    """Return the state of {"kind": "llama", "params": ...} or {"kind": "small", "tensors": ...}."""
    return llama_state(workload["params"]) if workload["kind"] == "llama" else small_state(workload["tensors"])


def filled(state: BenchState, seed: int = 0) -> BenchState:
    """Fill every tensor of `state` with its own noise, except single numbers. Return `state`."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in state.tensors().values():
        if tensor.dim():
            tensor.uniform_(-1, 1, generator=generator)
    return state


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of `tensor`."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


def _zeros(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.empty_like(tensor).zero_() for name, tensor in tensors.items()}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)
