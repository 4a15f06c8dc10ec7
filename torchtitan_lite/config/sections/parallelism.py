"""The section [parallelism]: how a job spreads over its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torchtitan_lite.config.checks import at_least, choice
from torchtitan_lite.config.field_types import check_types

PipelineSchedule = Literal["1F1B", "GPipe", "Interleaved1F1B"]


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How ranks share the model. The product of the degrees is the number of processes."""

    data_parallel_replicate_degree: int = 1
    """Groups of ranks that each hold a whole model and take different data (HSDP; DDP, if nothing is sharded)."""

    data_parallel_shard_degree: int = -1
    """Ranks over which FSDP2 shards parameters; -1: what is left."""

    tensor_parallel_degree: int = 1
    """Ranks that share each layer and, between layers, the sequence; it divides the model's heads, n_kv_heads too."""

    pipeline_parallel_degree: int = 1
    """Ranks that each hold some of the layers, one stage after the other."""

    pipeline_parallel_schedule: PipelineSchedule = "1F1B"
    """Order of the micro-batches. 1F1B, GPipe: one stage a rank; Interleaved1F1B: two, or as the split points say."""

    pipeline_parallel_split_points: tuple[str, ...] = ()
    """First layer of each stage but the first one, as layers.2,layers.4; empty: as equal as can be, the first and the
    last stage the shorter ones."""

    pipeline_parallel_microbatch_size: int = 1
    """Sequences of a local batch that pass a stage at a time."""

    pipeline_parallel_microbatches: int | None = None
    """Micro-batches that a local batch is split into; if set, it counts instead of the size."""

    def __post_init__(self) -> None:
        check_types(self, "parallelism")
        if self.data_parallel_shard_degree != -1:
            at_least("parallelism.data_parallel_shard_degree (or -1)", self.data_parallel_shard_degree, 1)
        for name in ("data_parallel_replicate_degree", "tensor_parallel_degree", "pipeline_parallel_degree"):
            at_least(f"parallelism.{name}", getattr(self, name), 1)
        choice("parallelism.pipeline_parallel_schedule", self.pipeline_parallel_schedule, get_args(PipelineSchedule))
        at_least("parallelism.pipeline_parallel_microbatch_size", self.pipeline_parallel_microbatch_size, 1)
        if self.pipeline_parallel_microbatches is not None:
            at_least("parallelism.pipeline_parallel_microbatches", self.pipeline_parallel_microbatches, 1)
