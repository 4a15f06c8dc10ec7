"""Other names for keys: those of torchtitan's versions of October 2024 to February 2026, its last one with TOMLs.

An alias stands for one key. Where a switch became a choice, the alias also maps its values. Keys of [parallelism] are
also accepted in [training] and [experimental], their former sections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Alias:
    """Another name for `key`. With `values` it is a switch whose "true" and "false" become these values of the key."""

    key: str
    values: Mapping[str, str] = field(default_factory=dict)


ALIASES: Mapping[str, Alias] = {
    "job.print_config": Alias("job.print_args"),
    "metrics.save_for_all_ranks": Alias("metrics.rank_0_only", {"true": "false", "false": "true"}),
    "model.hf_assets_path": Alias("model.tokenizer_path"),
    "optimizer.fused": Alias("optimizer.implementation", {"true": "fused", "false": "foreach"}),
    "lr_scheduler.lr_min": Alias("lr_scheduler.min_lr_factor"),
    "training.warmup_steps": Alias("lr_scheduler.warmup_steps"),
    "training.local_batch_size": Alias("training.batch_size"),
    "compile.enable": Alias("training.compile"),
    "debug.seed": Alias("training.seed"),
    "debug.deterministic": Alias("training.deterministic"),
    "checkpoint.enable": Alias("checkpoint.enable_checkpoint"),
    "checkpoint.last_save_model_only": Alias("checkpoint.model_weights_only"),
    "checkpoint.last_save_model_weights_only": Alias("checkpoint.model_weights_only"),
    "checkpoint.last_save_in_safetensors_format": Alias("checkpoint.last_save_in_hf"),
    "checkpoint.initial_load_model_weights_only": Alias("checkpoint.initial_load_model_only"),
}

VALUE_ALIASES: Mapping[str, Mapping[str, str]] = {
    "model.name": {"llama": "llama3"},
    "checkpoint.interval_type": {"step": "steps", "second": "seconds"},
}

FORMER_SECTIONS_OF_PARALLELISM = ("training", "experimental")
