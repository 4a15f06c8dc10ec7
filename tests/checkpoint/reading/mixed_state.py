"""A state of several dtypes, and memory for it in other layouts, on any device."""

from __future__ import annotations

import torch

from tests.checkpoint.reading.stored_boxes import numbers


def saved() -> dict[str, torch.Tensor]:
    return {
        "a": numbers((3000, 700), torch.float32, 1),
        "b": numbers((2000, 1000), torch.bfloat16, 2),
        "c": numbers((), torch.float64, 3),
        "d": numbers((500, 300), torch.int64, 4),
    }


def empty(device: str = "cpu") -> dict[str, torch.Tensor]:
    """Memory for it: as it is stored, transposed, and of another dtype."""
    state = {name: torch.zeros_like(tensor, device=device) for name, tensor in saved().items()}
    b = torch.zeros(1000, 2000, dtype=torch.bfloat16, device=device).t()
    return state | {"b": b, "d": state["d"].to(torch.int32)}
