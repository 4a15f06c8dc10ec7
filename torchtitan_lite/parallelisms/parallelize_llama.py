"""Parallelize a Llama, or a pipeline stage of it, in place.

Tensor parallelism, activation checkpointing, compilation and FSDP are applied in this order. The compute dtype is the
same function of the config on every topology: with mixed precision FSDP casts, also on one rank, and one rank in
float32 keeps a plain module. For the same reason DDP is FSDP over replicas of one shard each. Parameters and gradients
are always float32. FQNs, as DCP's `get_model_state_dict` spells them, do not change.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan_lite.config.job_config import ActivationCheckpoint, JobConfig
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import logger
from torchtitan_lite.parallelisms.parallel_dims import ParallelDims
from torchtitan_lite.torch_private import expensive_operators, recomputing

# The logits are a view of a DTensor. FSDP warns against changing such a view in place, which no loss does.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def parallelize_llama(model: nn.Module, mesh: DeviceMesh, dims: ParallelDims, config: JobConfig) -> None:
    """Make `model` compute as `config` says, over the ranks of `mesh`, which `dims` built. **Collective**.

    The model should still be on the meta device.
    """
    layers = model.get_submodule("layers")
    if dims.tp > 1:
        apply_tensor_parallelism(model, mesh["tp"])
    apply_activation_checkpointing(layers, config.activation_checkpoint, preserve_rng_state=config.model.dropout > 0)
    if config.training.compile:
        compile_blocks(layers)
    if _is_sharded(dims, config):
        # In a pipeline, resharding would gather the parameters again for each micro-batch.
        _shard(model, layers, dims.dp_mesh(mesh), config, reshard_after_forward=dims.pp == 1)


def compile_blocks(layers: nn.Module) -> None:
    """Compile each child of `layers`, in place; equal blocks share one compilation."""
    for block in layers.children():
        # Compile the forward, not the module: FSDP's hooks stay outside the graph, and no FQN gets a prefix.
        block.forward = torch.compile(block.forward, fullgraph=True)
    logger.info("Each transformer block is compiled")


def _is_sharded(dims: ParallelDims, config: JobConfig) -> bool:
    training = config.training
    # Mixed precision on one process is FSDP over one rank, because autocast rounds at other places than FSDP's policy.
    # With nothing to cast or to shard, a plain module is easiest to read and to debug.
    return dims.dp_degree > 1 or training.mixed_precision_param != "float32" or training.enable_cpu_offload


def _shard(
    model: nn.Module, layers: nn.Module, mesh: DeviceMesh, config: JobConfig, *, reshard_after_forward: bool
) -> None:
    training = config.training
    # Also for plain data parallelism, as HSDP with one shard: DDP with autocast casts and reduces at other places than
    # FSDP, and checkpoints would depend on which of the two it was.
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, training.mixed_precision_param),
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        ),
    }
    if training.enable_cpu_offload:
        if mesh.device_type == "cpu":
            raise ConfigError(
                "training.enable_cpu_offload: expected an accelerator to offload from, found none. Unset it."
            )
        settings["offload_policy"] = CPUOffloadPolicy()
    blocks = list(layers.children())
    for block in blocks:
        # Backward starts with the last block: if freed after forward, it would be gathered again at once.
        fully_shard(block, reshard_after_forward=reshard_after_forward and block is not blocks[-1], **settings)
    fully_shard(model, **settings)


EXPENSIVE: set[Callable[..., Any]] = {torch.ops.aten.mm.default, *expensive_operators()}


def apply_activation_checkpointing(
    layers: nn.Module, config: ActivationCheckpoint, *, preserve_rng_state: bool
) -> None:
    """Wrap the children of `layers` that `config` selects, in place."""
    if config.mode == "none":
        return
    by_operator = config.mode == "selective" and config.selective_ac_option == "op"
    every = int(config.selective_ac_option) if config.mode == "selective" and not by_operator else 1
    settings: dict[str, Any] = {"preserve_rng_state": preserve_rng_state}
    if by_operator:
        settings["context_fn"] = keep_expensive_results
    for number, (name, block) in enumerate(list(layers.named_children()), start=1):
        if number % every == 0:
            layers.register_module(name, recomputing(block, **settings))


def keep_expensive_results() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts of forward and recomputation that keep the results of attention and of every second matmul."""
    counts = {False: 0, True: 0}

    def policy(context: Any, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator == torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operator in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call, no-any-return]  # torch's gap


# Tensor and sequence parallelism of a Llama.
#
# Between blocks, and in norms and dropout, each rank holds its part of the sequence. Inside attention and feed-forward
# it holds the whole sequence and its part of the heads or of the width. Parameters become DTensors over the mesh and
# keep their FQNs. Each rank gets the whole logits. (Korthikanti et al. 2022, in torchtitan's layout.)


SEQUENCE = Shard(1)
"""[batch, seq, dim], split along the sequence."""


TIED_OUTPUT = PrepareModuleInputOutput(
    input_layouts=(SEQUENCE, None),
    desired_input_layouts=(Replicate(), None),
    output_layouts=Shard(-1),
    desired_output_layouts=Replicate(),
)
"""Of an output whose weight is the embedding, which is split along the vocabulary as an output's own weight is."""


def apply_tensor_parallelism(model: nn.Module, mesh: DeviceMesh) -> None:
    """Distribute `model`, or a pipeline stage of it, over the ranks of the one-dimensional `mesh`, in place."""
    ends: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Replicate()),
    }
    if next(model.get_submodule("output").parameters(), None) is None:
        ends["output"] = TIED_OUTPUT
    # A pipeline stage has an identity in place of an end that belongs to another stage.
    plan = {name: style for name, style in ends.items() if not isinstance(model.get_submodule(name), nn.Identity)}
    parallelize_module(model, mesh, plan)
    for block in model.get_submodule("layers").children():
        parallelize_module(block, mesh, _block_plan())


def _block_plan() -> dict[str, ParallelStyle]:
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(SEQUENCE, None), desired_input_layouts=(Replicate(), None)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=SEQUENCE),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(SEQUENCE,), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=SEQUENCE),
        "feed_forward.w3": ColwiseParallel(),
    }
