"""The first FSDP, which torch has deprecated."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel


def fsdp1(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return FullyShardedDataParallel(model, use_orig_params=True, device_mesh=mesh, device_id=torch.device("cpu"))
