"""The sizes that a configuration chooses: those of a flavor, or those in a file of other software."""

from __future__ import annotations

import dataclasses

from torchtitan_lite.config.job_config import Model
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models.llama.args import FLAVORS, ModelArgs
from torchtitan_lite.models.llama.config_file import args_in


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
