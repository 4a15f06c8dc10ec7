"""Our Llama as one of Hugging Face: every parameter has a place, and a config.json has the same sizes or is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models.llama.args import FLAVORS, ModelArgs
from torchtitan_lite.models.llama.hugging_face import args_of, describe
from torchtitan_lite.models.llama.model import Transformer

SIZES = {"vocab_size": 128, "hidden_size": 24, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = SIZES | {"model_type": "llama"}
TIED = dataclasses.replace(FLAVORS["debugmodel"], tie_word_embeddings=True)


@pytest.mark.parametrize("args", [*FLAVORS.values(), TIED], ids=[*FLAVORS, "tied"])
def test_every_parameter_has_one_place_of_its_shape(args: ModelArgs) -> None:
    with torch.device("meta"):
        parameters = Transformer(args).state_dict()
    places = describe(args, {}, 1, 2).places
    assert {name: tuple(each.shape) for name, each in parameters.items()} == {n: p.shape for n, p in places.items()}
    assert len({place.name for place in places.values()}) == len(places)
    turned = {name.split(".")[-2] for name, place in places.items() if place.rotary_head_dim is not None}
    assert turned == {"wq", "wk"}


@pytest.mark.parametrize("args", [*FLAVORS.values(), TIED], ids=[*FLAVORS, "tied"])
def test_the_config_of_a_model_gives_its_sizes_back(args: ModelArgs) -> None:
    found = args_of(json.loads(json.dumps(describe(args, {}, None, None).config)))
    assert describe(found, {}, None, None) == describe(args, {}, None, None)


def test_files_of_the_tokenizer_are_next_to_the_generation_config() -> None:
    files = describe(FLAVORS["debugmodel"], {"tokenizer.json": b"{}"}, 256, 257).files
    assert files["tokenizer.json"] == b"{}"
    assert json.loads(files["generation_config.json"]) == {
        "bos_token_id": 256,
        "eos_token_id": 257,
        "do_sample": False,
    }


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"model_type": "qwen2"}, "model_type: expected llama, or mistral without a window, found 'qwen2'"),
        ({"model_type": None}, "found None"),
        ({"hidden_act": "gelu"}, "the Llama of this package has no hidden_act 'gelu'"),
        ({"attention_bias": True}, "the Llama of this package has no attention_bias"),
        ({"mlp_bias": True}, "the Llama of this package has no mlp_bias"),
        ({"sliding_window": 4096}, "the Llama of this package has no sliding_window"),
        ({"model_type": "mistral"}, "the Llama of this package has no sliding_window"),  # 4096 unless it says null
        ({"model_type": "mistral", "sliding_window": 64}, "the Llama of this package has no sliding_window"),
        ({"model_type": ["llama"]}, "found ['llama']"),
        ({"head_dim": 128}, "the Llama of this package has no head_dim 128"),
        (
            {"num_key_value_heads": 3},
            "the Llama of this package has no num_key_value_heads 3 with num_attention_heads 4",
        ),
        ({"num_attention_heads": 5}, "the Llama of this package has no hidden_size 24 with num_attention_heads 5"),
        (
            {"num_attention_heads": 8},
            "the Llama of this package has no hidden_size 24 with num_attention_heads 8",
        ),  # of 3 rows
        ({"hidden_size": None}, "hidden_size: expected a whole number from 1 on, found None"),
        ({"vocab_size": "many"}, "vocab_size: expected a whole number from 1 on, found 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected a whole number from 1 on, found 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers: expected a whole number from 1 on, found True"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps: expected a positive number, found nan"),
        ({"rope_theta": "x"}, "rope_theta: expected a positive number, found 'x'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "no rotary embedding of type 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "no rotary embedding of type 'yarn'"),
        ({"rope_parameters": "default"}, "rope_parameters: expected an object"),
    ],
)
def test_what_our_llama_lacks_is_refused_by_name(change: dict[str, Any], finding: str) -> None:
    with pytest.raises(ConfigError) as raised:
        args_of(LLAMA | change)
    assert finding in str(raised.value)


def test_what_a_config_does_not_say_is_as_in_transformers() -> None:
    args = args_of({name: value for name, value in LLAMA.items() if name != "num_key_value_heads"})
    assert (args.n_kv_heads, args.norm_eps, args.rope_theta, args.max_seq_len) == (4, 1e-6, 10000.0, 2048)
    assert args.ffn_dim == 96


@pytest.mark.parametrize(
    "theta", [{"rope_theta": 7e4}, {"rope_parameters": {"rope_theta": 7e4, "rope_type": "default"}}]
)
def test_the_rotary_base_in_both_spellings(theta: dict[str, Any]) -> None:
    assert args_of(LLAMA | theta).rope_theta == 7e4


@pytest.mark.parametrize("width", [1, 2, 63, 64, 65, 1000, 11008, 14336, 53248])
@pytest.mark.parametrize("dim", [2, 64, 1000, 4096, 16384])
def test_any_width_of_the_feed_forward(dim: int, width: int) -> None:
    sizes = {"hidden_size": dim, "intermediate_size": width, "num_attention_heads": 1, "num_key_value_heads": 1}
    assert args_of(LLAMA | sizes).ffn_dim == width
