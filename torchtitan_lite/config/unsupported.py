"""Keys of features that this package does not support: torchtitan's, and some that it had before its first release.

The table is there so that a torchtitan TOML, and a copy of an older llama_debug.toml, loads: a key is accepted at the
value that leaves its feature off, and refused at any other. `ANY` marks an option that has no effect while its feature
is off. When a feature is added, its keys become fields in `config/sections/` and leave this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_lite.config.value_kinds import ValueKind, command_line_text
from torchtitan_lite.errors import ConfigError


@dataclass(frozen=True)
class OneOf:
    """Any of these values leaves the feature off."""

    values: tuple[object, ...]


ANY = OneOf(())


@dataclass(frozen=True)
class Unsupported:
    """A key of an unsupported `feature`. The `accepted` texts leave it off; an empty tuple accepts every text."""

    feature: str
    accepted: tuple[str, ...]
    kind: ValueKind
    instead: str = ""
    """What serves in its place; empty for nothing."""

    def check(self, name: str, text: str, where: str) -> None:
        """Raise ConfigError if `text` turns the feature on."""
        if self.accepted and text.lower() not in map(str.lower, self.accepted):
            off = self.accepted[0]
            fix = "Leave it out" if off == "None" else f"Leave it out, or turn it off with --{name}={off}"
            raise ConfigError(f"{where} = {text}: {self.feature} is not supported. {self.instead}{fix}.")


def _any_value_options(section: str, names: str) -> dict[str, object]:
    return {f"{section}.{name}": ANY for name in names.split()}


INCREMENTAL = "saving only what has changed"
SWITCHES = "a switch of its own for each time of digests"
BEST_MODE = "a key for the side of the best metric"
PEER_COPIES, RATE_OF_PEER_COPIES = "the earlier name of the key for peer copies", "the earlier name of their rate"
CONVERSION = "conversion of the model (float8, MX)"
SECTIONS_OF_CONVERSION = ("float8", "mx", "quantize")
_DATALOADER_OPTIONS = "persistent_workers pin_memory prefetch_factor"
_FLOAT8_OPTIONS = (
    "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp recipe_name filter_fqns emulate"
)
_MX_OPTIONS = "mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns"

_FEATURES: Mapping[str, Mapping[str, object]] = {
    "asynchronous tensor parallelism": {"parallelism.enable_async_tensor_parallel": False},
    "a loss on logits that stay sharded": _any_value_options(
        "parallelism", "enable_loss_parallel disable_loss_parallel"
    ),
    "another way to cut a model into stages": {
        "parallelism.pipeline_parallel_schedule_csv": "",
        "parallelism.pipeline_parallel_layers_per_stage": None,
        "parallelism.pipeline_parallel_first_stage_less_layers": OneOf((1, 0)),
        "parallelism.pipeline_parallel_last_stage_less_layers": OneOf((1, 0)),
        "parallelism.pipeline_parallel_expert_parallel_overlap": ANY,
        "parallelism.module_fqns_per_model_part": None,
    },
    "context parallelism (torch has none for CPUs)": {
        "parallelism.context_parallel_degree": 1,
        **_any_value_options("parallelism", "context_parallel_rotate_method context_parallel_load_balancer"),
    },
    "expert parallelism": {
        "parallelism.expert_parallel_degree": 1,
        "parallelism.expert_tensor_parallel_degree": 1,
        **_any_value_options("parallelism", "expert_parallel_comm_backend"),
        "debug.moe_force_load_balance": False,
        "training.debug_moe_force_load_balance": False,
    },
    "a choice of when FSDP frees parameters": {"parallelism.fsdp_reshard_after_forward": "default"},
    "compiled autograd": {"parallelism.enable_compiled_autograd": False},
    "a choice of what is compiled, and how": {
        "compile.components": OneOf((["model", "loss"], ["model"])),
        "compile.backend": "inductor",
    },
    CONVERSION: {
        "float8.enable_float8_linear": False,
        "model.converters": [],
        "model.print_after_conversion": ANY,
        **_any_value_options(
            "float8", f"{_FLOAT8_OPTIONS} force_recompute_fp8_weight_in_bwd moe_fqns moe_fqns_prototype"
        ),
        **_any_value_options("float8", "scaling_type_input scaling_type_weight scaling_type_grad_output"),
        **_any_value_options("mx", f"{_MX_OPTIONS} moe_fqns_prototype use_fp8_dim1_cast_triton_kernel"),
        **_any_value_options("quantize.linear.float8", _FLOAT8_OPTIONS),
        **_any_value_options("quantize.linear.mx", _MX_OPTIONS),
        **_any_value_options("quantize.dense.float8", _FLOAT8_OPTIONS),
        **_any_value_options("quantize.dense.mx", _MX_OPTIONS),
        **_any_value_options("quantize.grouped_mm.float8", "fqns"),
        **_any_value_options("quantize.grouped_mm.mx", "fqns recipe_name"),
        **_any_value_options("quantize.moe.float8", "fqns"),
        **_any_value_options("quantize.moe.mx", "fqns"),
    },
    "a norm other than RMSNorm": {"model.norm_type": "rmsnorm"},
    "attention other than causal": {"model.attn_mask_type": "causal", "model.use_flex_attn": False},
    "a parameter dtype other than float32": {"training.dtype": "float32"},
    "the optimizer step inside backward": {"optimizer.early_step_in_backward": False},
    "a length of the learning rate's curve other than training.steps": {"lr_scheduler.total_steps": None},
    "validation": {
        "validation.enable": False,
        "validation.enabled": False,
        **_any_value_options("validation", "dataset dataset_path local_batch_size seq_len freq steps"),
        **_any_value_options("validation.dataloader", f"num_workers {_DATALOADER_OPTIONS}"),
    },
    "a data loader with workers": {
        "training.dataloader.num_workers": 0,
        **_any_value_options("training.dataloader", _DATALOADER_OPTIONS),
    },
    "memory estimation": {
        "memory_estimation.enable": False,
        "memory_estimation.enabled": False,
        "memory_estimation.disable_fake_mode": ANY,
    },
    "TorchFT": {
        "fault_tolerance.enable": False,
        **_any_value_options("fault_tolerance", "process_group process_group_timeout_ms replica_id group_size"),
        **_any_value_options(
            "fault_tolerance", "min_replica_size semi_sync_method sync_steps should_quantize num_fragments"
        ),
        **_any_value_options(
            "fault_tolerance", "fragment_sync_delay fragment_update_alpha module_fqns_per_model_fragment"
        ),
        "checkpoint.enable_ft_dataloader_checkpoints": ANY,
    },
    "loading quantized weights of Hugging Face's format": {"checkpoint.initial_load_in_hf_quantized": False},
    "finer control of activation checkpointing": {
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": OneOf((["moe.router.gate"], [])),
        "activation_checkpoint.early_stop": False,
        "activation_checkpoint.memory_budget": ANY,
        "activation_checkpoint.visualize_memory_budget_pareto": False,
        "activation_checkpoint.preserve_rng_state": ANY,
        "activation_checkpoint.determinism_check": "default",
        "activation_checkpoint.debug": False,
    },
    "coloured output": _any_value_options("metrics", "enable_color_printing disable_color_printing"),
    "a choice of whether checkpoints restore the logs": {"metrics.disable_logging_from_checkpoint": False},
    "a choice of communication mode and traces": {
        "comm.mode": "default",
        "comm.save_traces_folder": "comm_traces",
        "comm.save_traces_file_prefix": "rank_",
    },
    "debugging of the garbage collector": {"training.gc_debug": False},
    "warning only about what is not deterministic": {"debug.deterministic_warn_only": False},
    "code from a config": {
        "job.custom_config_module": "",
        "experimental.custom_import": "",
        "experimental.custom_args_module": "",
        "experimental.custom_model_path": "",
    },
    "a place of your own for the resolved config (it is dump_folder/config.json)": {
        "job.save_config_file": None,
        "job.save_config_folder": None,
    },
    "torchtitan's test suite": {"job.use_for_integration_test": ANY},
    INCREMENTAL: {"checkpoint.incremental": False, "checkpoint.incremental_full_every": ANY},
    SWITCHES: {
        "checkpoint.tensor_digests": False,
        "checkpoint.verify_resume": False,
        "checkpoint.debug_staging": False,
    },
    BEST_MODE: {"checkpoint.keep_best_mode": "min"},
    "a file for Prometheus (ledger.now and metrics.jsonl have its figures)": {"metrics.prometheus_file": ""},
    PEER_COPIES: {"checkpoint.memory_replicas": 0},
    RATE_OF_PEER_COPIES: {"checkpoint.memory_replica_max_mb_per_second": 0.0},
}
_INSTEAD = {
    PEER_COPIES: "Set checkpoint.memory_peer_copies. ",
    RATE_OF_PEER_COPIES: "Set checkpoint.memory_peer_copy_max_mb_per_second. ",
    BEST_MODE: 'Set checkpoint.keep_best_metric to "max:NAME" for the highest values. ',
    SWITCHES: 'Add "save", "load" or "staging" to checkpoint.digest_tensors. ',
    INCREMENTAL: "Leave frozen parameters out with checkpoint.save_trained_only, or keep frozen models out of what is "
    "saved (docs/several_models.md). ",
}


def _unsupported_feature(feature: str, off: object) -> Unsupported:
    values = off.values if isinstance(off, OneOf) else (off,)
    if not values or values == (None,):
        return Unsupported(feature, tuple(map(command_line_text, values)), ValueKind(object))
    kind = object if isinstance(values[0], list) else type(values[0])  # Some versions wrote "float8" for ["float8"].
    return Unsupported(feature, tuple(map(command_line_text, values)), ValueKind(kind), _INSTEAD.get(feature, ""))


UNSUPPORTED: Mapping[str, Unsupported] = {
    name: _unsupported_feature(feature, off) for feature, keys in _FEATURES.items() for name, off in keys.items()
}
