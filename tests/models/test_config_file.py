"""`model.config_path`: the sizes of a published Llama in place of a flavor's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.config.job_config import Model
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models.llama.args import FLAVORS, ModelArgs, RopeScaling, args_of_settings, settings_of
from torchtitan_lite.models.llama.config_file import args_in, args_of_params, build_model_args, fitting_flavor
from torchtitan_lite.models.llama.hugging_face import args_of, describe

LLAMA_3_8B = {
    **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5},
    **{"rope_theta": 500000.0, "max_position_embeddings": 8192},
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA_3_1_8B = LLAMA_3_8B | {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}
PARAMS_OF_3_8B = {
    **{"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "multiple_of": 1024},
    **{"ffn_dim_multiplier": 1.3, "norm_eps": 1e-05, "rope_theta": 500000.0},
}
PARAMS_OF_2_7B = {"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-05, "vocab_size": -1}


def written(folder: Path, name: str, document: Any) -> Path:
    (folder / name).write_text(json.dumps(document))
    return folder / name


@pytest.mark.parametrize("names_the_folder", [True, False])
@pytest.mark.parametrize(("name", "document"), [("config.json", LLAMA_3_8B), ("params.json", PARAMS_OF_3_8B)])
def test_both_files_have_the_sizes_of_the_flavor(
    tmp_path: Path, name: str, document: dict[str, Any], names_the_folder: bool
) -> None:
    path = written(tmp_path, name, document)
    args = args_in(str(tmp_path if names_the_folder else path))
    assert (args.ffn_dim, args.vocab_size, args.n_kv_heads) == (14336, 128256, 8)
    assert fitting_flavor(args) == "8B"


def test_a_scaled_rotary_embedding_is_another_model_than_the_flavor_of_these_sizes() -> None:
    args = args_of(LLAMA_3_1_8B)
    assert args.rope_scaling == RopeScaling(factor=8.0)
    assert args_of_params(PARAMS_OF_3_8B | {"use_scaled_rope": True}).rope_scaling == args.rope_scaling
    assert fitting_flavor(args) == ""


def test_llama_2_has_the_defaults_that_its_params_leave_out() -> None:
    args = args_of_params(PARAMS_OF_2_7B, vocab_size=32000)
    assert (args.vocab_size, args.n_kv_heads, args.rope_theta, args.ffn_dim) == (32000, 32, 10000.0, 11008)


@pytest.mark.parametrize("flavor", FLAVORS)
def test_a_flavor_is_found_again_in_its_own_config(flavor: str) -> None:
    config = describe(FLAVORS[flavor], {}, None, None).config
    assert fitting_flavor(args_of(config)) == flavor


def test_a_scaled_rotary_embedding_comes_back_from_the_config_that_is_written() -> None:
    args = args_of(LLAMA_3_1_8B)
    config = describe(args, {}, None, None).config
    assert args_of(config).rope_scaling == args.rope_scaling
    assert config["max_position_embeddings"] == 65536


def test_the_model_takes_the_sizes_of_the_file_and_the_length_of_the_run(tmp_path: Path) -> None:
    config = Model(config_path=str(written(tmp_path, "config.json", LLAMA_3_1_8B)), dropout=0.5)
    args = build_model_args(config, vocab_size=258, seq_len=16)
    assert args == ModelArgs(ffn_dim=14336, max_seq_len=16, dropout=0.5, rope_scaling=RopeScaling(factor=8.0))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    config = Model(config_path=str(written(tmp_path, "config.json", LLAMA_3_8B | {"vocab_size": 200})))
    with pytest.raises(ConfigError, match=r"the model has 200 tokens, and model\.tokenizer_path has 258"):
        build_model_args(config, vocab_size=258, seq_len=16)


@pytest.mark.parametrize(
    ("name", "text", "finding"),
    [
        ("config.json", "[]", "expected an object with the sizes of a Llama"),
        ("config.json", "{", "cannot be read"),
        ("config.json", '{"model_type": "qwen3"}', "found 'qwen3'"),
        ("params.json", '{"dim": 0}', "dim: expected a whole number from 1 on, found 0"),
        ("params.json", '{"dim": 8, "n_heads": 2, "n_layers": 1000000000000}', "n_layers: expected a whole number"),
        (
            "params.json",
            '{"dim": 8, "n_heads": 3, "n_layers": 1}',
            "expected dim to be a multiple of n_heads, and n_heads of n_kv_heads, found 8, 3 and 3",
        ),
        ("other.json", '{"model_type": "llama"}', "num_attention_heads: expected a whole number"),
    ],
)
def test_a_file_that_is_no_llama_is_refused(tmp_path: Path, name: str, text: str, finding: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=finding):
        args_in(str(tmp_path / name))


def test_a_folder_without_either_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json, and no params\.json"):
        args_in(str(tmp_path))


@pytest.mark.parametrize(("name", "sizes"), [("config.json", LLAMA_3_8B), ("params.json", PARAMS_OF_3_8B)])
def test_tied_embeddings_make_another_model_than_the_flavor_of_these_sizes(
    tmp_path: Path, name: str, sizes: dict[str, Any]
) -> None:
    args = args_in(str(written(tmp_path, name, sizes | {"tie_word_embeddings": True})))
    assert args.tie_word_embeddings and fitting_flavor(args) == ""
    assert "tie_word_embeddings" not in settings_of(args_in(str(written(tmp_path, name, sizes))))


def test_another_rope_type_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no rotary embedding of type 'yarn', only default and llama3"):
        args_of(LLAMA_3_8B | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}})


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers: expected a whole number"),
        ({"hidden_size": 10**100, "num_attention_heads": 1}, "hidden_size: expected a whole number"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "no rotary embedding of a part of each head"),
    ],
)
def test_sizes_beyond_any_model_are_refused_at_once(change: dict[str, Any], finding: str) -> None:
    with pytest.raises(ConfigError, match=finding):
        args_of(LLAMA_3_8B | change)


def test_the_settings_that_a_checkpoint_records_are_those_of_the_model() -> None:
    for document in (LLAMA_3_8B, LLAMA_3_1_8B, LLAMA_3_8B | {"tie_word_embeddings": True}):
        args = args_of(document)
        assert args_of_settings(json.loads(json.dumps(settings_of(args)))) == dataclasses.replace(
            args, max_seq_len=ModelArgs().max_seq_len
        )
