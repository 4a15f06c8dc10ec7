"""Tensor and sequence parallelism of a Llama.

Between blocks, and in norms and dropout, each rank holds its part of the sequence. Inside attention and feed-forward it
holds the whole sequence and its part of the heads or of the width. Parameters become DTensors over the mesh and keep
their FQNs. Each rank gets the whole logits. (Korthikanti et al. 2022, in torchtitan's layout.)
"""

from __future__ import annotations

import warnings

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
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

# The logits are a view of a DTensor. FSDP warns against changing such a view in place, which no loss does.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

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
