"""Activation checkpointing, compilation and sharding of a Llama, in that order, in place.

The compute dtype is the same function of the config in every topology: where a mixed precision is
asked for, FSDP casts, on one rank too; one rank in float32 stays a plain module. Parameters and
gradients are float32 always. FQNs, as DCP's `get_model_state_dict` spells them, do not change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import logger
from torchtitan_lite.parallelisms.activation_checkpoint import apply_activation_checkpointing


def parallelize_llama(model: nn.Module, mesh: DeviceMesh | None, config: JobConfig) -> None:
    """`model`, best still on the meta device, computes as `config` says over the ranks of `mesh`. **Collective**."""
    layers = model.get_submodule("layers")
    apply_activation_checkpointing(layers, config.activation_checkpoint, preserve_rng_state=config.model.dropout > 0)
    if config.training.compile:
        compile_blocks(layers)
    if _is_sharded(mesh, config):
        _shard(model, layers, _required(mesh, config), config)


def compile_blocks(layers: nn.Module) -> None:
    """Each child of `layers` runs compiled; equal blocks share one compilation."""
    for block in layers.children():
        # The forward, not the module: FSDP's hooks stay outside the graph, and no name gets a prefix.
        block.forward = torch.compile(block.forward, fullgraph=True)
    logger.info("Each transformer block is compiled")


def _is_sharded(mesh: DeviceMesh | None, config: JobConfig) -> bool:
    training = config.training
    several_ranks = mesh is not None and mesh.size() > 1
    return several_ranks or training.mixed_precision_param != "float32" or training.enable_cpu_offload


def _required(mesh: DeviceMesh | None, config: JobConfig) -> DeviceMesh:
    if mesh is None:
        raise ConfigError(
            f"training.mixed_precision_param: {config.training.mixed_precision_param} needs a device mesh, of one rank "
            "if there is one, found none. Open a process group, or set --training.mixed_precision_param=float32."
        )
    return mesh


def _shard(model: nn.Module, layers: nn.Module, mesh: DeviceMesh, config: JobConfig) -> None:
    training = config.training
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, training.mixed_precision_param),
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        ),
    }
    if training.enable_cpu_offload:
        if mesh.device_type == "cpu":
            raise ConfigError("training.enable_cpu_offload: expected an accelerator to offload from, found none.")
        settings["offload_policy"] = CPUOffloadPolicy()
    blocks = list(layers.children())
    for block in blocks:
        # Backward begins with the last block: freed after forward, it would be gathered again at once.
        fully_shard(block, reshard_after_forward=block is not blocks[-1], **settings)
    fully_shard(model, **settings)
    logger.info("FSDP shards the model over %d ranks, computing in %s", mesh.size(), training.mixed_precision_param)
