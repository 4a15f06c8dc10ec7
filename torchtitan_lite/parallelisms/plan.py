"""How a job uses its ranks, decided before a model is built.

The plan is a pure function of the config, the model's sizes and the number of processes. One rank computes it for all
ranks, and an error of one sentence refuses whatever does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models.llama.args import ModelArgs
from torchtitan_lite.parallelisms.parallel_dims import ParallelDims, build_parallel_dims
from torchtitan_lite.parallelisms.pipeline_llama import Stage, build_stages, num_microbatches


@dataclass(frozen=True)
class Plan:
    """The degrees, the pipeline's stages (one without a pipeline), and the micro-batches in a local batch."""

    dims: ParallelDims
    stages: tuple[Stage, ...]
    num_microbatches: int

    def stages_of(self, rank: int) -> tuple[Stage, ...]:
        """Return the stages that `rank` holds: every pp-th one."""
        return self.stages[self.dims.pp_rank(rank) :: self.dims.pp]


def build_plan(config: JobConfig, sizes: ModelArgs, world_size: int) -> Plan:
    """Return the plan for `config`. Raise ConfigError if the ranks, the model or the batch do not fit it."""
    dims = build_parallel_dims(config.parallelism, world_size)
    split = {"n_heads": sizes.n_heads, "n_kv_heads": sizes.n_kv_heads, "feed-forward width": sizes.ffn_dim}
    for name, size in {**split, "seq_len": config.training.seq_len}.items():
        if size % dims.tp:
            raise ConfigError(
                f"parallelism.tensor_parallel_degree: expected a divisor of the model's {name} {size}, found {dims.tp}."
            )
    if dims.tp > 1 and config.training.compile:
        raise ConfigError(
            "training.compile: blocks that tensor parallelism splits cannot be compiled here; "
            "leave it off, or set tensor_parallel_degree = 1."
        )
    if dims.pp == 1:
        return Plan(dims, (Stage(0, 1, range(sizes.n_layers)),), num_microbatches=1)
    if config.training.mixed_precision_param == "float16":
        raise ConfigError(
            "training.mixed_precision_param: float16 needs a gradient scaler, which a pipeline has none of; "
            "set bfloat16 or float32, or pipeline_parallel_degree = 1."
        )
    if sizes.tie_word_embeddings:
        raise ConfigError(
            "parallelism.pipeline_parallel_degree: the embeddings of this model are tied, and the first and the last "
            "stage cannot have one parameter; expected 1, "
            f"found {dims.pp}. Set data_parallel_shard_degree or tensor_parallel_degree in its place."
        )
    stages = build_stages(config.parallelism, sizes.n_layers)
    return Plan(dims, tuple(stages), num_microbatches(config))
