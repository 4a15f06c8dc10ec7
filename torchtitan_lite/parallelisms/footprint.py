"""What a plan puts on each rank, known before any memory is used: the first half of a dry run's output.

Counted on the modules that the run would build, cut and sharded on the meta device. Rank 0 of a pipeline rank has the
first shard of every parameter, which is the largest, so the largest rank is one of these. Parameters, gradients and
moments are float32 (`parallelize_llama`). Activations, gathered blocks and buffers of collectives are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.config.job_config import Training
from torchtitan_lite.log import counted, readable_bytes
from torchtitan_lite.parallelisms.pipeline_llama import Stage
from torchtitan_lite.parallelisms.plan import Plan

_BYTES = 4
_MOMENTS = 2
"""Tensors of the shape of a parameter that Adam keeps for it."""


@dataclass(frozen=True)
class RankFootprint:
    """What the largest of the ranks with the same `stages` holds."""

    stages: tuple[Stage, ...]
    num_params: int

    def __str__(self) -> str:
        return f"{self.num_params:,} parameters, {readable_bytes(self.num_bytes)}"

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters, their gradients and Adam's moments."""
        return self.num_params * _BYTES * (2 + _MOMENTS)


@dataclass(frozen=True)
class Footprint:
    """`held` by pipeline rank, and what all ranks together hold and take in a step."""

    plan: Plan
    num_params: int
    held: tuple[RankFootprint, ...]
    training: Training
    global_batch_size: int

    def __str__(self) -> str:
        dims, batch_size, seq_len = self.plan.dims, self.training.batch_size, self.training.seq_len
        largest = max(self.held, key=lambda held: held.num_params)
        ranks = counted(dims.world_size, "rank") + (f" ({dims})" if dims.world_size > 1 else "")
        accumulation = self.global_batch_size // (batch_size * dims.dp_degree)
        parts = [f"{counted(dims.dp_degree, 'share')} of {batch_size}"]
        parts += [f"accumulated {accumulation} times"] if accumulation > 1 else []
        parts += ["in " + counted(self.plan.num_microbatches, "micro-batch")] if dims.pp > 1 else []
        params = readable_bytes(self.num_params * _BYTES)
        checkpoint = readable_bytes(self.num_params * _BYTES * (1 + _MOMENTS))
        lines = [
            f"The plan fits {ranks}:",
            f"  step: {counted(self.global_batch_size, 'sequence')} of {counted(seq_len, 'token')}: {', '.join(parts)}",
            f"  tokens in a step: {self.global_batch_size * seq_len:,}",
            f"  model: {self.num_params:,} parameters, {params}; a full checkpoint: {checkpoint}",
            f"  largest rank: {largest}",
            "    with gradients and Adam's moments in float32, without activations",
        ]
        if dims.pp > 1:
            lines += [f"  pp rank {rank}: {_layers(held.stages)}: {held}" for rank, held in enumerate(self.held)]
        return "\n".join(lines)


def footprint(
    plan: Plan,
    build_part: Callable[[Stage], nn.Module],
    training: Training,
    global_batch_size: int,
    num_params: int,
) -> Footprint:
    """Return what `plan` puts on the ranks; `build_part` returns a stage, sharded, on the meta device. Any rank."""
    dims = plan.dims
    by_pp_rank = [plan.stages_of(rank * dims.dp_degree * dims.tp) for rank in range(dims.pp)]
    held = [RankFootprint(stages, num_local_params(map(build_part, stages))) for stages in by_pp_rank]
    return Footprint(plan, num_params, tuple(held), training, global_batch_size)


def num_local_params(parts: Iterable[nn.Module]) -> int:
    """Return the elements of this rank's shards of all parameters."""
    parameters = (parameter for part in parts for parameter in part.parameters())
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)


def _layers(stages: Sequence[Stage]) -> str:
    return "layers " + " and ".join(f"{stage.layers[0]}-{stage.layers[-1]}" for stage in stages)
