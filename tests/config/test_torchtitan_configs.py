"""A torchtitan TOML loads: its names are understood, and keys of unsupported features are accepted while off."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from scripts.launch import check_files
from torchtitan_lite.config.keys import ALIASES, FORMER_SECTIONS_OF_PARALLELISM, KEYS, VALUE_ALIASES
from torchtitan_lite.config.manager import parse_config
from torchtitan_lite.config.own_loop import loop_config
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
def test_the_test_corpus_of_torchtitan_is_an_error_that_says_how_to_name_it(file):
    with pytest.raises(ConfigError, match=r"found 'c4_test'.*huggingface --training\.dataset_path=NAME.* a folder"):
        parse_config(["--job.config_file", file, "--model.tokenizer_path=bytes"])


@pytest.mark.parametrize(("name", "split"), [("c4", "train"), ("c4_validation", "validation")])
def test_a_dataset_of_torchtitan_is_that_of_hugging_face(tmp_path, name, split):
    (tmp_path / "c4.toml").write_text(f'[training]\ndataset = "{name}"\n')
    training = parse_config(["--job.config_file", str(tmp_path / "c4.toml")]).training
    assert (training.dataset, training.dataset_path, training.dataset_subset) == ("huggingface", "allenai/c4", "en")
    assert training.dataset_split == split


def test_the_path_that_is_given_with_a_dataset_of_torchtitan_counts():
    training = parse_config(["--training.dataset=c4", "--training.dataset_path=/data/c4"]).training
    assert (training.dataset, training.dataset_path, training.dataset_subset) == ("huggingface", "/data/c4", "en")


@pytest.mark.parametrize("name", ["fineweb", "cc12m", "cc12m-test", "coco_validation"])
def test_an_unknown_dataset_is_sent_to_hugging_face(name):
    with pytest.raises(ConfigError, match=rf"found '{name}'.*huggingface --training\.dataset_path=NAME"):
        parse_config([f"--training.dataset={name}"])


def test_a_misspelled_dataset_is_sent_to_the_nearest():
    with pytest.raises(ConfigError, match=r"found 'parqet'\. Set --training\.dataset=parquet\.$"):
        parse_config(["--training.dataset=parqet"])


@pytest.mark.parametrize("name", ["qwen3", "llama4", "deepseek_v3", "flux"])
def test_a_model_of_another_family_is_sent_to_own_loops_before_all_else(tmp_path, name):
    file = tmp_path / "other.toml"
    file.write_text(f'[encoder]\nt5 = "x"\n[model]\nname = "{name}"\nflavor = "0.6B"\n[training]\ndataset = "c4"\n')
    with pytest.raises(
        ConfigError, match=rf"other\.toml: model\.name = {name}: .*only the family llama3.*docs/own_loop\.md\.$"
    ):
        parse_config(["--job.config_file", str(file), "--training.no_such_key=1"])


def test_the_command_line_names_the_model_for_a_toml_of_another_family(tmp_path):
    (tmp_path / "other.toml").write_text('[model]\nname = "qwen3"\n')
    argv = ["--job.config_file", str(tmp_path / "other.toml"), "--model.name=llama3"]
    assert parse_config(argv).model.name == "llama3"


@pytest.mark.parametrize(
    "toml",
    [
        '[model]\nconverters = "float8"\n',
        '[model]\nconverters = ["float8"]\n[float8]\nmoe_fqns = ["experts"]\n',
        "[float8]\nsome_later_option = true\n",
        "[quantize.linear.nvfp4]\nfilter_fqns = []\n",
    ],
)
def test_float8_is_an_error_that_says_that_it_is_not_supported(tmp_path, toml):
    (tmp_path / "float8.toml").write_text(toml)
    with pytest.raises(ConfigError, match=r"conversion of the model \(float8, MX\) is not supported\. Leave it out"):
        parse_config(["--job.config_file", str(tmp_path / "float8.toml")])


def test_a_tokenizer_model_of_tiktoken_is_an_error_that_names_what_is_supported():
    with pytest.raises(ConfigError, match=r"model\.tokenizer_path: expected 'bytes', a tokenizer\.json or"):
        check_files(parse_config(["--job.config_file", NOVEMBER_2024, "--training.dataset=stdlib"]))


def test_the_folder_that_torchtitan_downloads_a_tokenizer_into_is_accepted():
    config = parse_config(["--job.config_file", FEBRUARY_2026, "--training.dataset=stdlib"])
    assert config.model.tokenizer_path == "./tests/assets/tokenizer"


def test_keys_of_unsupported_features_are_accepted_with_one_line_while_off(caplog):
    caplog.set_level(logging.INFO, logger="torchtitan_lite")
    parse_config(["--job.config_file", FEBRUARY_2026, *SUPPORTED])
    (record,) = caplog.records
    for key in ("quantize.linear.float8.filter_fqns", "validation.steps", "compile.components"):
        assert key in record.getMessage()


def test_an_older_llama_debug_loads_with_one_line_for_the_keys_that_went(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="torchtitan_lite")
    off = ("keep_best_mode = 'min'", "tensor_digests = false", "incremental = false", "incremental_full_every = 10")
    lines = ["[checkpoint]", *off]
    (tmp_path / "old.toml").write_text("\n".join(lines))
    parse_config(["--job.config_file", str(tmp_path / "old.toml")])
    (record,) = caplog.records
    for key in ("incremental", "incremental_full_every"):
        assert f"checkpoint.{key}" in record.getMessage()


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("incremental", True, "checkpoint.save_trained_only"),
        ("tensor_digests", True, 'Add "save", "load" or "staging" to checkpoint.digest_tensors'),
        ("keep_best_mode", "max", 'Set checkpoint.keep_best_metric to "max:NAME"'),
        ("memory_replicas", 1, "Set checkpoint.memory_peer_copies"),
        ("memory_replica_max_mb_per_second", 5.0, "Set checkpoint.memory_peer_copy_max_mb_per_second"),
        ("digest_tensors", ["replicas"], "expected one of save, load, staging, ranks, found 'replicas'"),
        ("interval_type", "continuous", "expected one of steps, seconds, auto, none, found 'continuous'"),
    ],
)
def test_what_went_is_refused_with_its_replacement_wherever_it_is_set(tmp_path, key, value, instead):
    text = value[0] if isinstance(value, list) else str(value).lower()
    (tmp_path / "old.toml").write_text(f"[checkpoint]\n{key} = {value!r}\n".lower())
    for argv in (["--job.config_file", str(tmp_path / "old.toml")], [f"--checkpoint.{key}={text}"]):
        with pytest.raises(ConfigError, match=re.escape(instead)):
            parse_config(argv)
    with pytest.raises(ConfigError, match=re.escape(instead)):
        loop_config(tmp_path / "checkpoint", {key: value})


def test_a_loop_of_ones_own_may_leave_off_what_went(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="torchtitan_lite")
    loop_config(tmp_path / "checkpoint", {"incremental": False, "incremental_full_every": 3, "interval": 5})
    assert [record.getMessage().rpartition(" ")[2] for record in caplog.records] == [
        "incremental",
        "incremental_full_every",
    ]


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
    assert set(ALIASES.values()) <= set(KEYS)
    assert set(VALUE_ALIASES) <= set(KEYS)
    assert not set(ALIASES) & set(KEYS)
    assert not set(UNSUPPORTED) & (set(KEYS) | set(ALIASES))
    for section in FORMER_SECTIONS_OF_PARALLELISM:
        moved = {f"{section}.{key.partition('.')[2]}" for key in KEYS if key.startswith("parallelism.")}
        assert not moved & (set(KEYS) | set(ALIASES))
