"""The section [parallelism]: how ranks share the model and the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torchtitan_lite.config.checks import at_least, choice
from torchtitan_lite.config.field_types import check_types

PipelineSchedule = Literal["1F1B", "GPipe", "Interleaved1F1B"]


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How ranks share the model and the data. The product of the degrees is the number of processes."""

    data_parallel_replicate_degree: int = 1
    """Groups of ranks that each hold the complete model and take different data: HSDP, or DDP if
    data_parallel_shard_degree is 1."""

    data_parallel_shard_degree: int = -1
    """Ranks over which FSDP2 shards parameters; -1: all that the other degrees leave."""

    tensor_parallel_degree: int = 1
    """Ranks that share each layer and, between layers, the sequence. Must divide the model's n_heads, n_kv_heads and
    feed-forward width, and seq_len."""

    pipeline_parallel_degree: int = 1
    """Ranks that each hold some of the layers, as stages of a pipeline."""

    pipeline_parallel_schedule: PipelineSchedule = "1F1B"
    """Order of the micro-batches. "1F1B" and "GPipe" have one stage a rank, "Interleaved1F1B" two, or as many as the
    split points make."""

    pipeline_parallel_split_points: tuple[str, ...] = ()
    """First layer of each stage except the first one, such as layers.2,layers.4. Empty: stages of equal length as far
    as possible, the first and the last one shorter, because they also hold the embedding and the output."""

    pipeline_parallel_microbatch_size: int = 1
    """Sequences in a micro-batch, the part of a local batch that goes through a stage at a time."""

    pipeline_parallel_microbatches: int | None = None
    """Micro-batches in a local batch; if set, it overrides pipeline_parallel_microbatch_size."""

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
