"""A torchtitan TOML loads: its names are understood, and keys of unsupported features are accepted while off."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from torchtitan_lite.config.aliases import ALIASES, FORMER_SECTIONS_OF_PARALLELISM, VALUE_ALIASES
from torchtitan_lite.config.keys import KEYS
from torchtitan_lite.config.manager import parse_config
from torchtitan_lite.config.unsupported import UNSUPPORTED
from torchtitan_lite.errors import ConfigError

NOVEMBER_2024 = str(Path(__file__).with_name("torchtitan_debug_2024_11.toml"))
FEBRUARY_2026 = str(Path(__file__).with_name("torchtitan_debug_2026_02.toml"))
SUPPORTED = ["--training.dataset=stdlib", "--model.tokenizer_path=bytes"]


@pytest.mark.parametrize("file", [NOVEMBER_2024, FEBRUARY_2026])
def test_a_torchtitan_toml_loads_with_a_supported_dataset_and_tokenizer(file):
    config = parse_config(["--job.config_file", file, *SUPPORTED])
    assert (config.training.batch_size, config.training.seq_len, config.training.steps) == (8, 2048, 10)
    assert config.lr_scheduler.warmup_steps == 2
    assert config.checkpoint.enable_checkpoint is False
    assert (config.training.dataset, config.model.tokenizer_path) == ("stdlib", "bytes")


@pytest.mark.parametrize("file", [NOVEMBER_2024, FEBRUARY_2026])
def test_an_unsupported_dataset_is_an_error_that_names_the_supported_ones(file):
    with pytest.raises(ConfigError, match=r"one of stdlib, text, jsonl, parquet, huggingface, found 'c4_test'"):
        parse_config(["--job.config_file", file, "--model.tokenizer_path=bytes"])


def test_a_tokenizer_model_of_tiktoken_is_an_error_that_names_what_is_supported():
    with pytest.raises(ConfigError, match=r"model\.tokenizer_path: expected 'bytes', a tokenizer\.json or"):
        parse_config(["--job.config_file", NOVEMBER_2024, "--training.dataset=stdlib"])


def test_the_folder_that_torchtitan_downloads_a_tokenizer_into_is_accepted():
    config = parse_config(["--job.config_file", FEBRUARY_2026, "--training.dataset=stdlib"])
    assert config.model.tokenizer_path == "./tests/assets/tokenizer"


def test_keys_of_unsupported_features_are_accepted_with_one_line_while_off(caplog):
    caplog.set_level(logging.INFO, logger="torchtitan_lite")
    parse_config(["--job.config_file", FEBRUARY_2026, *SUPPORTED])
    (record,) = caplog.records
    for key in ("quantize.linear.float8.filter_fqns", "validation.steps", "compile.components"):
        assert key in record.getMessage()


@pytest.mark.parametrize(
    ("words", "feature"),
    [
        ("--float8.enable_float8_linear", "float8"),
        ("--model.converters float8", "float8"),
        ("--model.norm_type layernorm", "RMSNorm"),
        ("--validation.enable", "validation"),
        ("--memory_estimation.enabled", "memory estimation"),
        ("--optimizer.early_step_in_backward true", "inside backward"),
        ("--checkpoint.initial_load_in_hf_quantized", "quantized weights"),
        ("--experimental.context_parallel_degree 2", "context parallelism"),
        ("--parallelism.expert_parallel_degree=2", "expert parallelism"),
    ],
)
def test_an_unsupported_feature_is_an_error_when_turned_on(words, feature):
    with pytest.raises(ConfigError) as caught:
        parse_config(words.split())
    assert feature in str(caught.value)
    assert "is not supported. Leave it out, or turn it off with --" in str(caught.value)


def test_the_command_line_may_turn_off_an_unsupported_feature_that_the_toml_turns_on(tmp_path):
    (tmp_path / "ft.toml").write_text("[fault_tolerance]\nenable = true\n")
    argv = ["--job.config_file", str(tmp_path / "ft.toml")]
    with pytest.raises(ConfigError, match=r"ft\.toml: fault_tolerance\.enable = true"):
        parse_config(argv)
    assert parse_config([*argv, "--fault_tolerance.no_enable"]).metrics.log_freq == 10


def test_a_value_of_the_wrong_kind_is_refused_for_an_unsupported_feature_too(tmp_path):
    (tmp_path / "ft.toml").write_text('[fault_tolerance]\nenable = "false"\n')
    with pytest.raises(ConfigError, match="expected true or false, found the string 'false'"):
        parse_config(["--job.config_file", str(tmp_path / "ft.toml")])


@pytest.mark.parametrize(
    ("words", "key", "expected"),
    [
        ("--optimizer.fused", "optimizer.implementation", "fused"),
        ("--optimizer.no_fused", "optimizer.implementation", "foreach"),
        ("--optimizer.fused=False", "optimizer.implementation", "foreach"),
        ("--metrics.save_for_all_ranks", "metrics.rank_0_only", False),
        ("--model.name llama", "model.name", "llama3"),
        ("--training.warmup_steps 3", "lr_scheduler.warmup_steps", 3),
        ("--training.data_parallel_shard_degree 2", "parallelism.data_parallel_shard_degree", 2),
        ("--experimental.data_parallel_shard_degree 2", "parallelism.data_parallel_shard_degree", 2),
        ("--training.tensor_parallel_degree 2", "parallelism.tensor_parallel_degree", 2),
        ("--experimental.pipeline_parallel_degree 2", "parallelism.pipeline_parallel_degree", 2),
        ("--experimental.pipeline_parallel_schedule gpipe", "parallelism.pipeline_parallel_schedule", "GPipe"),
        ("--lr_scheduler.lr_min .1", "lr_scheduler.min_lr_factor", 0.1),
        ("--compile.enable", "training.compile", True),
        ("--debug.seed 3 --debug.deterministic", "training.seed", 3),
        ("--checkpoint.last_save_model_only", "checkpoint.model_weights_only", True),
        ("--training.batch_size 4 --training.local-batch-size 2", "training.batch_size", 2),
        ("--training.local_batch_size 2 --training.batch_size 4", "training.batch_size", 4),
    ],
)
def test_another_name_sets_the_key_that_it_stands_for_and_the_last_one_given_wins(words, key, expected):
    section, _, name = key.partition(".")
    assert parse_config(words.split()).to_dict()[section][name] == expected


def test_every_alias_stands_for_a_key_and_hides_none():
    assert {alias.key for alias in ALIASES.values()} <= set(KEYS)
    assert set(VALUE_ALIASES) <= set(KEYS)
    assert not set(ALIASES) & set(KEYS)
    assert not set(UNSUPPORTED) & (set(KEYS) | set(ALIASES))
    for section in FORMER_SECTIONS_OF_PARALLELISM:
        moved = {f"{section}.{key.partition('.')[2]}" for key in KEYS if key.startswith("parallelism.")}
        assert not moved & (set(KEYS) | set(ALIASES))
