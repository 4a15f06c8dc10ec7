"""A checkpoint as DCP's tool turns it into one file for `torch.load`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def as_one_file(checkpoint: Path, *, weights_only: bool = True) -> dict[str, Any]:
    """Return what is in the file, read without unpickling if `weights_only`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "one.pt")
        dcp_to_torch_save(checkpoint, file)
        loaded: dict[str, Any] = torch.load(file, weights_only=weights_only)
    return loaded
