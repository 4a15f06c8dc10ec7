"""The sizes of a Llama, from the file that is next to its weights elsewhere: config.json, or Meta's params.json.

`model.config_path` names such a file or its folder, and the model then has its sizes in place of the flavor's.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan_lite.config.job_config import Model
from torchtitan_lite.disk.plain_file import read_plain
from torchtitan_lite.errors import CheckpointUnsafe, ConfigError
from torchtitan_lite.models.llama.args import FLAVORS, ModelArgs, RopeScaling
from torchtitan_lite.models.llama.hugging_face import CONFIG, MOST_LAYERS, TIED, args_of, count_in, positive_in

PARAMS = "params.json"
FACTOR = "rope_scaling_factor"
"""Of Meta's params.json; usually it has none."""
_MOST_BYTES = 1 << 20
_FACTOR_OF_3_1, _FACTOR_OF_3_2 = 8.0, 32.0
_SMALLEST_OF_3_1 = 4096
"""The dim of the smallest Llama 3.1; those of 3.2 are smaller, and params.json states no factor."""


def args_in(given: str) -> ModelArgs:
    """Return the sizes in `given`: a config.json, a params.json, or a folder with one of them. Raise ConfigError."""
    path = Path(given)
    if path.is_dir():
        found = [path / name for name in (CONFIG, PARAMS) if (path / name).is_file()]
        if not found:
            raise ConfigError(f"model.config_path: {given} has no {CONFIG}, and no {PARAMS} of Meta's.")
        path = found[0]
    try:
        document = json.loads(read_plain(path.resolve(), _MOST_BYTES))
    except (OSError, ValueError, RecursionError, CheckpointUnsafe) as error:
        raise ConfigError(f"model.config_path: {given} cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"model.config_path: {given}: expected an object with the sizes of a Llama.")
    return args_of_params(document) if path.name == PARAMS else args_of(document)


def args_of_params(params: Mapping[str, Any], vocab_size: int = 0) -> ModelArgs:
    """Return the sizes in Meta's `params`; `vocab_size` counts where they have none. Raise ConfigError."""
    if "moe_args" in params or "vision_chunk_size" in params:
        raise ConfigError(
            f"{PARAMS}: the Llama of this package has no mixture of experts and no vision: it cannot be read"
        )
    count, positive = partial(count_in, params, file=PARAMS), partial(positive_in, params, file=PARAMS)
    dim, heads = count("dim"), count("n_heads")
    in_params = params.get("vocab_size", -1)
    width = int(positive("ffn_dim_multiplier", 1.0) * int(2 * 4 * dim / 3))
    multiple = count("multiple_of", 256)
    args = ModelArgs(
        dim=dim,
        n_layers=count("n_layers", most=MOST_LAYERS),
        n_heads=heads,
        n_kv_heads=count("n_kv_heads", heads),
        vocab_size=vocab_size if in_params == -1 else count("vocab_size"),
        ffn_dim=-(-width // multiple) * multiple,
        norm_eps=positive("norm_eps", 1e-5),
        rope_theta=positive("rope_theta", 10000.0),
        rope_scaling=_meta_rope_scaling(params, dim),
        tie_word_embeddings=bool(params.get(TIED)),  # Meta's own files never say it.
    )
    if args.dim % args.n_heads or args.n_heads % args.n_kv_heads:
        raise ConfigError(
            f"{PARAMS}: expected dim to be a multiple of n_heads, and n_heads of n_kv_heads, found {dim}, {heads} and "
            f"{args.n_kv_heads}"
        )
    return args


def fitting_flavor(args: ModelArgs) -> str:
    """Return the flavor that has the sizes and settings of `args`, whatever its vocabulary; "" if none has."""

    def comparable(of: ModelArgs) -> ModelArgs:
        return dataclasses.replace(of, vocab_size=0, max_seq_len=0)

    return next((name for name, flavor in FLAVORS.items() if comparable(flavor) == comparable(args)), "")


def _meta_rope_scaling(params: Mapping[str, Any], dim: int) -> RopeScaling | None:
    if not params.get("use_scaled_rope"):
        return None
    usual = _FACTOR_OF_3_1 if dim >= _SMALLEST_OF_3_1 else _FACTOR_OF_3_2
    return RopeScaling(factor=positive_in(params, FACTOR, usual, file=PARAMS))


# The sizes that a configuration chooses: those of a flavor, or those in a file of other software.


def build_model_args(config: Model, *, vocab_size: int, seq_len: int) -> ModelArgs:
    """Return the sizes that `config` names, for the vocabulary of this tokenizer and this sequence length.

    A config file (`model.config_path`) states its own vocabulary, because the weights that come with it have that one.
    Raises ConfigError for an unknown flavor, a file that is no Llama, and a vocabulary that is too small.
    """
    if config.config_path:
        args = args_in(config.config_path)
        if args.vocab_size < vocab_size:
            raise ConfigError(
                f"model.config_path: the model has {args.vocab_size} tokens, and model.tokenizer_path has {vocab_size}."
                " Set --model.tokenizer_path to the tokenizer of this model."
            )
        return dataclasses.replace(args, max_seq_len=seq_len, dropout=config.dropout)
    if config.flavor not in FLAVORS:
        raise ConfigError(f"model.flavor: expected one of {', '.join(FLAVORS)}, found {config.flavor!r}.")
    return dataclasses.replace(
        FLAVORS[config.flavor], vocab_size=vocab_size, max_seq_len=seq_len, dropout=config.dropout
    )
