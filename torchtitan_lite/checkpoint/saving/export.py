"""The state of a weights-only checkpoint.

Pure: casts make new tensors, and tensors that training uses do not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchtitan_lite.checkpoint.state.model import is_extra

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""The values of `checkpoint.export_dtype`."""


def weights_only(model_state: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the model's state by bare FQN, floating-point tensors cast to `dtype`, all else unchanged. Any rank."""
    return {fqn: _cast(fqn, value, dtype) for fqn, value in model_state.items()}


def _cast(fqn: str, value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach() if is_extra(fqn, value) or not value.is_floating_point() else value.detach().to(dtype)
