"""Everything that is done to a Llama, or to a pipeline stage of it, before it trains, in place.

Tensor parallelism, activation checkpointing, compilation, FSDP, in that order. The compute dtype is
the same function of the config in every topology: where a mixed precision is asked for, FSDP casts,
on one rank too; one rank in float32 stays a plain module. DDP is FSDP over replicas of one shard
each, for the same reason. Parameters and gradients are float32 always. FQNs, as DCP's
`get_model_state_dict` spells them, do not change.
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
from torchtitan_lite.parallelisms.parallel_dims import ParallelDims
from torchtitan_lite.parallelisms.tensor_parallel import apply_tensor_parallelism


def parallelize_llama(model: nn.Module, mesh: DeviceMesh, dims: ParallelDims, config: JobConfig) -> None:
    """`model`, best still on the meta device, computes as `config` says over the ranks of `mesh`, which is of `dims`.

    **Collective**.
    """
    layers = model.get_submodule("layers")
    if dims.tp > 1:
        apply_tensor_parallelism(model, mesh["tp"])
    apply_activation_checkpointing(layers, config.activation_checkpoint, preserve_rng_state=config.model.dropout > 0)
    if config.training.compile:
        compile_blocks(layers)
    if _is_sharded(dims, config):
        # Each micro-batch of a pipeline would gather the parameters again.
        _shard(model, layers, dims.dp_mesh(mesh), config, reshard_after_forward=dims.pp == 1)


def compile_blocks(layers: nn.Module) -> None:
    """Each child of `layers` runs compiled; equal blocks share one compilation."""
    for block in layers.children():
        # The forward, not the module: FSDP's hooks stay outside the graph, and no name gets a prefix.
        block.forward = torch.compile(block.forward, fullgraph=True)
    logger.info("Each transformer block is compiled")


def _is_sharded(dims: ParallelDims, config: JobConfig) -> bool:
    training = config.training
    return dims.dp_degree > 1 or training.mixed_precision_param != "float32" or training.enable_cpu_offload


def _shard(
    model: nn.Module, layers: nn.Module, mesh: DeviceMesh, config: JobConfig, *, reshard_after_forward: bool
) -> None:
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
        fully_shard(block, reshard_after_forward=reshard_after_forward and block is not blocks[-1], **settings)
    fully_shard(model, **settings)
