"""What goes into a weights-only checkpoint.

Pure: tensors come in, new tensors go out, and nothing that training still uses is touched.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""The values of `checkpoint.export_dtype`."""


def weights_only(model_state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The model's state under its bare FQNs, floating tensors cast to `dtype`, all others as they are. Any rank."""
    return {
        fqn: tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
        for fqn, tensor in model_state.items()
    }
