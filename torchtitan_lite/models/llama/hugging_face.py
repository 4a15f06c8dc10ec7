"""Our Llama as `LlamaForCausalLM` of Hugging Face's transformers, in both directions.

The two compute the same function of the same weights. Names differ, and the order of the rows of queries and keys:
their rotary embedding rotates halves of a head, ours neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.hugging_face.known_model import HuggingFaceModel
from torchtitan_lite.hugging_face.model_files import Place
from torchtitan_lite.models.llama.args import ModelArgs, RopeScaling

if TYPE_CHECKING:
    from torchtitan_lite.examining.tensor_stream import TensorStream

_LLAMA3 = "llama3"
"""The rope type of Llama 3.1 and later."""
HEAD = "lm_head.weight"
"""Their name of the output projection."""
OUTPUT, EMBEDDING = "output.weight", "tok_embeddings.weight"
"""Our names of the output projection and of the embedding. Tied, they are the embedding alone."""
TIED = "tie_word_embeddings"
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
}
"""The families that compute what our Llama does, and what transformers takes in each where config.json is silent."""
CONFIG, GENERATION = "config.json", "generation_config.json"
MOST_LAYERS = 10_000
"""More would only make a hostile config.json take long to refuse."""
_MOST = 1 << 40
_ROPE_THETA = 10000.0
_NORM_EPS = 1e-6
_LENGTH = 2048
"""What transformers takes where config.json does not say it."""


def describe(
    args: ModelArgs, tokenizer_files: Mapping[str, bytes], bos: int | None, eos: int | None
) -> HuggingFaceModel:
    """Return the model of these sizes, with the marks of its tokenizer.

    Both transformers 4 and 5 read the configuration: 4 takes `rope_theta`, 5 `rope_parameters`.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "intermediate_size": args.ffn_dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _length(args),
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "rope_parameters": {"rope_theta": args.rope_theta, **_rope_scaling_config(args)},
        **({"rope_scaling": _rope_scaling_config(args)} if args.rope_scaling is not None else {}),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        TIED: args.tie_word_embeddings,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "use_cache": True,
    }
    return HuggingFaceModel(config, places_of(args), {**tokenizer_files, GENERATION: generation_config(bos, eos)})


def generation_config(bos: int | None, eos: int | Sequence[int] | None) -> bytes:
    """Return the contents of generation_config.json: the marks, and no sampling unless a caller asks for it."""
    settings = {"bos_token_id": bos, "eos_token_id": eos, "do_sample": False}
    return (json.dumps(settings, indent=2) + "\n").encode()


def _rope_scaling_config(args: ModelArgs) -> dict[str, Any]:
    """Return how the rotary embedding is scaled, in the words of transformers."""
    scaling = args.rope_scaling
    if scaling is None:
        return {"rope_type": "default"}
    return {
        "rope_type": _LLAMA3,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_length,
    }


def _length(args: ModelArgs) -> int:
    """Return the longest sequence that the model is for; a scaled one is for more than the original length."""
    scaling = args.rope_scaling
    return args.max_seq_len if scaling is None else max(args.max_seq_len, int(scaling.original_length * scaling.factor))


def places_of(args: ModelArgs) -> dict[str, Place]:
    """Return the place of each parameter, in the order of the model."""
    dim, ffn_dim, head_dim = args.dim, args.ffn_dim, args.head_dim
    queries, keys = args.n_heads * head_dim, args.n_kv_heads * head_dim
    found = {EMBEDDING: Place("model.embed_tokens.weight", (args.vocab_size, dim))}
    for number in range(args.n_layers):
        ours, theirs = f"layers.{number}", f"model.layers.{number}"
        found |= {
            f"{ours}.attention.wq.weight": Place(f"{theirs}.self_attn.q_proj.weight", (queries, dim), head_dim),
            f"{ours}.attention.wk.weight": Place(f"{theirs}.self_attn.k_proj.weight", (keys, dim), head_dim),
            f"{ours}.attention.wv.weight": Place(f"{theirs}.self_attn.v_proj.weight", (keys, dim)),
            f"{ours}.attention.wo.weight": Place(f"{theirs}.self_attn.o_proj.weight", (dim, queries)),
            f"{ours}.feed_forward.w1.weight": Place(f"{theirs}.mlp.gate_proj.weight", (ffn_dim, dim)),
            f"{ours}.feed_forward.w2.weight": Place(f"{theirs}.mlp.down_proj.weight", (dim, ffn_dim)),
            f"{ours}.feed_forward.w3.weight": Place(f"{theirs}.mlp.up_proj.weight", (ffn_dim, dim)),
            f"{ours}.attention_norm.weight": Place(f"{theirs}.input_layernorm.weight", (dim,)),
            f"{ours}.ffn_norm.weight": Place(f"{theirs}.post_attention_layernorm.weight", (dim,)),
        }
    found["norm.weight"] = Place("model.norm.weight", (dim,))
    if not args.tie_word_embeddings:
        found[OUTPUT] = Place(HEAD, (args.vocab_size, dim))
    return found


def are_equal(stream: Callable[[], TensorStream], first: str, second: str) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes. `stream` returns a new reader of both.

    Other software may store the output projection next to a tied embedding: it is dropped only if they are equal.
    """
    one, other = stream(), stream()
    a, b = one.contents.tensors[first], other.contents.tensors[second]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    pairs = zip(one.slices(first), other.slices(second), strict=True)
    return all(x == y for x, y in pairs)


def args_of(config: Mapping[str, Any]) -> ModelArgs:
    """Return the sizes of the model that `config`, the contents of a config.json, describes.

    Raises ConfigError that names what our Llama lacks, and what `config` has no sensible value for.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        raise ConfigError(f"config.json: model_type: expected llama, or mistral without a window, found {kind!r}")
    config = {**_DEFAULTS[kind], **config}
    heads, rope = count_in(config, "num_attention_heads"), _rope(config)
    dim = count_in(config, "hidden_size")
    kv_heads = count_in(config, "num_key_value_heads", heads)
    for is_odd, finding in (
        (config.get("hidden_act", "silu") not in ("silu", "swish"), f"hidden_act {config.get('hidden_act')!r}"),
        (bool(config.get("attention_bias")), "attention_bias"),
        (bool(config.get("mlp_bias")), "mlp_bias"),
        (config.get("sliding_window") is not None, "sliding_window"),
        (dim % heads != 0 or dim // heads % 2 != 0, f"hidden_size {dim} with num_attention_heads {heads}"),
        (config.get("head_dim") not in (None, dim // heads), f"head_dim {config.get('head_dim')!r}"),
        (rope.get("partial_rotary_factor", 1.0) != 1.0, "rotary embedding of a part of each head"),
        (heads % kv_heads != 0, f"num_key_value_heads {kv_heads} with num_attention_heads {heads}"),
    ):
        if is_odd:
            raise ConfigError(f"config.json: the Llama of this package has no {finding}: it cannot be read")
    return ModelArgs(
        dim=dim,
        n_layers=count_in(config, "num_hidden_layers", most=MOST_LAYERS),
        n_heads=heads,
        n_kv_heads=kv_heads,
        vocab_size=count_in(config, "vocab_size"),
        ffn_dim=count_in(config, "intermediate_size"),
        norm_eps=positive_in(config, "rms_norm_eps", _NORM_EPS),
        rope_theta=positive_in(rope if "rope_theta" in rope else config, "rope_theta", _ROPE_THETA),
        rope_scaling=_rope_scaling(rope),
        tie_word_embeddings=bool(config.get(TIED)),
        max_seq_len=count_in(config, "max_position_embeddings", _LENGTH),
    )


def _rope_scaling(parameters: Mapping[str, Any]) -> RopeScaling | None:
    """Return how the rotary embedding is scaled; None if it is not. Raise ConfigError if it is in another way."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return None
    if kind != _LLAMA3:
        raise ConfigError(
            f"config.json: the Llama of this package has no rotary embedding of type {kind!r}, only "
            f"default and {_LLAMA3}: it cannot be read"
        )
    return RopeScaling(
        factor=positive_in(parameters, "factor"),
        low_freq_factor=positive_in(parameters, "low_freq_factor"),
        high_freq_factor=positive_in(parameters, "high_freq_factor"),
        original_length=count_in(parameters, "original_max_position_embeddings"),
    )


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ConfigError("config.json: rope_parameters: expected an object")
    return parameters


def count_in(
    config: Mapping[str, Any], name: str, default: int | None = None, most: int = _MOST, *, file: str = CONFIG
) -> int:
    """Return the whole number `name` in `config`, the contents of `file`. Raise ConfigError for another value."""
    found = config.get(name)
    if found is None and default is not None:
        return default
    if type(found) is not int or not 1 <= found <= most:
        raise ConfigError(f"{file}: {name}: expected a whole number from 1 on, found {found!r:.50}")
    return found


def positive_in(config: Mapping[str, Any], name: str, default: float | None = None, *, file: str = CONFIG) -> float:
    """Return the positive number `name` in `config`, the contents of `file`. Raise ConfigError for another value."""
    found = config.get(name)
    if found is None and default is not None:
        return default
    if found is None or type(found) not in (int, float) or not found > 0:
        raise ConfigError(f"{file}: {name}: expected a positive number, found {found!r:.50}")
    return float(found)
