"""What a plan puts on each rank, known before any memory is used: the first half of a dry run's output.

Counted on the modules that the run would build, cut and sharded on the meta device. Rank 0 of a pipeline rank has the
first shard of every parameter, which is the largest, so the largest rank is one of these. Parameters, gradients and
moments are float32 (`parallelize_llama`). Activations, gathered blocks and buffers of collectives are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.config.job_config import Training
from torchtitan_lite.log import counted, readable_bytes
from torchtitan_lite.parallelisms.pipeline_llama import Stage
from torchtitan_lite.parallelisms.plan import Plan

_BYTES = 4
_MOMENTS = 2
"""Tensors of the shape of a parameter that Adam keeps for it."""


def footprint(plan: Plan, held: Sequence[int], training: Training, global_batch_size: int, num_params: int) -> str:
    """Return what all ranks together hold and take in a step, and what the largest one of each pipeline rank holds.

    `held` are the parameters by pipeline rank.
    """
    dims, batch_size, seq_len = plan.dims, training.batch_size, training.seq_len
    ranks = counted(dims.world_size, "rank") + (f" ({dims})" if dims.world_size > 1 else "")
    accumulation = global_batch_size // (batch_size * dims.dp_degree)
    parts = [f"{counted(dims.dp_degree, 'share')} of {batch_size}"]
    parts += [f"accumulated {accumulation} times"] if accumulation > 1 else []
    parts += ["in " + counted(plan.num_microbatches, "micro-batch")] if dims.pp > 1 else []
    params = readable_bytes(num_params * _BYTES)
    checkpoint = readable_bytes(num_params * _BYTES * (1 + _MOMENTS))
    lines = [
        f"The plan fits {ranks}:",
        f"  step: {counted(global_batch_size, 'sequence')} of {counted(seq_len, 'token')}: {', '.join(parts)}",
        f"  tokens in a step: {global_batch_size * seq_len:,}",
        f"  model: {num_params:,} parameters, {params}; a full checkpoint: {checkpoint}",
        f"  largest rank: {_held(max(held))}",
        "    with gradients and Adam's moments in float32, without activations",
    ]
    if dims.pp > 1:
        for rank, (stages, number) in enumerate(zip(_stages_by_pp_rank(plan), held, strict=True)):
            layers = " and ".join(f"{stage.layers[0]}-{stage.layers[-1]}" for stage in stages)
            lines.append(f"  pp rank {rank}: layers {layers}: {_held(number)}")
    return "\n".join(lines)


def held_parameters(plan: Plan, build_part: Callable[[Stage], nn.Module]) -> list[int]:
    """Return how many parameters rank 0 of each pipeline rank holds; `build_part` returns a sharded stage. Any rank."""
    held = []
    for stages in _stages_by_pp_rank(plan):
        parameters = [parameter for stage in stages for parameter in build_part(stage).parameters()]
        held.append(sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters))
    return held


def _stages_by_pp_rank(plan: Plan) -> list[tuple[Stage, ...]]:
    return [plan.stages_of(rank * plan.dims.dp_degree * plan.dims.tp) for rank in range(plan.dims.pp)]


def _held(num_params: int) -> str:
    """Return this number of parameters, with the bytes of these, of their gradients and of Adam's moments."""
    return f"{num_params:,} parameters, {readable_bytes(num_params * _BYTES * (2 + _MOMENTS))}"
